"""Connections: how many there may be, how long each may last, and how each ends."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from conveyor.api.server.server import HttpServer
from conveyor.http_server import connection, exchange
from conveyor.http_server.connection import Listener
from conveyor.http_server.exchange import parse_head
from tests.api.world import ANNA, World

pytestmark = pytest.mark.slow

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
POST = (
    f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nX-API-Key: {ANNA}\r\n"
    "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@dataclass(slots=True)
class Clients:
    """Opens connections to one server, and closes them at the end."""

    port: int
    streams: list[trio.SocketStream] = field(default_factory=list)

    async def connect(self) -> trio.SocketStream:
        self.streams.append(await trio.open_tcp_stream("127.0.0.1", self.port))
        return self.streams[-1]

    async def close(self) -> None:
        for stream in self.streams:
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def served(world: World, connections_max: int | None = None) -> AsyncIterator[Clients]:
    urls: list[str] = []
    server = HttpServer(
        make_app=lambda _: world.app,
        host="127.0.0.1",
        port=0,
        on_listening=urls.append,
        connections_max=connections_max,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        clients = Clients(int(urls[0].rpartition(":")[2]))
        yield clients
        nursery.cancel_scope.cancel()
    await clients.close()


async def _read_all(stream: trio.SocketStream) -> bytes:
    received = b""
    with suppress(trio.BrokenResourceError):
        async for piece in stream:
            received += piece
    return received


async def _ask(stream: trio.SocketStream, raw: bytes = HEALTH) -> bytes:
    await stream.send_all(raw)
    return bytes(await stream.receive_some())


async def test_a_new_connection_replaces_the_one_that_has_waited_longest(
    world: World,
) -> None:
    async with served(world, connections_max=3) as clients:
        waiting = [await clients.connect() for _ in range(3)]
        for stream in waiting:
            await _ask(stream)
        newcomer = await clients.connect()

        with trio.fail_after(10):
            answer = await _ask(newcomer)
            longest = await _read_all(waiting[0])
            others = [await _ask(stream) for stream in waiting[1:]]

    assert answer.startswith(b"HTTP/1.1 200")
    assert longest == b""
    assert all(other.startswith(b"HTTP/1.1 200") for other in others)


async def test_a_new_connection_is_answered_503_when_all_others_are_busy(world: World) -> None:
    async with served(world, connections_max=2) as clients:
        busy = [await clients.connect() for _ in range(2)]
        for stream in busy:
            await stream.send_all((POST % 10).encode() + b"{")
        await wait_all_tasks_blocked(0.05)

        with trio.fail_after(10):
            refused = await _read_all(await clients.connect())
            for stream in busy:
                await stream.aclose()
            answer = b""
            while not answer.startswith(b"HTTP/1.1 200"):
                with suppress(trio.BrokenResourceError):
                    answer = await _ask(await clients.connect())

    assert refused.startswith(b"HTTP/1.1 503")
    assert b"too_many_connections" in refused
    assert b"retry-after: 5" in refused


async def test_one_address_gets_half_of_the_connections_unless_it_is_a_proxy() -> None:
    async def refuse_everything(*_: object) -> None:
        raise AssertionError("no request is made here")

    async def run_nothing(_: object) -> None:
        await trio.sleep_forever()

    class Peer:
        def __init__(self, address: str) -> None:
            self.client_address = address

        async def run(self) -> None: ...
        async def refuse(self, refusal: object) -> None: ...
        async def abort(self) -> None: ...

    listener = Listener(
        refuse_everything,
        connections_max=8,
        run_connection=run_nothing,
        is_proxy=lambda address: address == "192.0.2.9",
    )

    async with trio.open_nursery() as nursery:
        for address in ["203.0.113.5"] * 6 + ["192.0.2.9"] * 6 + ["127.0.0.1"] * 6:
            listener._admit(Peer(address), nursery)  # type: ignore[arg-type]
        counts = dict(listener._by_address)
        nursery.cancel_scope.cancel()

    assert counts == {"203.0.113.5": 4, "192.0.2.9": 4}


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [(b"", connection.FIRST_BYTE_S), (b"GET /healthz HT", connection.HEAD_S)],
    ids=["no byte", "half a head"],
)
async def test_a_connection_that_sends_no_request_is_closed(
    world: World, mock_clock: MockClock, sent: bytes, limit_s: float
) -> None:
    async with served(world) as clients:
        stream = await clients.connect()
        if sent:
            await stream.send_all(sent)
        await wait_all_tasks_blocked(0.05)

        mock_clock.jump(limit_s + 1)
        received = await _read_all(stream)

    assert received.startswith(b"HTTP/1.1 408") if sent else received == b""


async def test_an_idle_connection_is_closed_after_its_keep_alive_time(
    world: World, mock_clock: MockClock
) -> None:
    async with served(world) as clients:
        stream = await clients.connect()
        await _ask(stream)
        await wait_all_tasks_blocked(0.05)
        mock_clock.jump(connection.KEEP_ALIVE_S - 5)
        still = await _ask(stream)
        await wait_all_tasks_blocked(0.05)

        mock_clock.jump(connection.KEEP_ALIVE_S + 1)
        after = await _read_all(stream)

    assert still.startswith(b"HTTP/1.1 200")
    assert after == b""


async def test_a_client_that_does_not_read_its_response_is_disconnected(
    world: World, mock_clock: MockClock
) -> None:
    job = await world.submit(1)
    (task,) = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    await world.succeed(job["job_id"], task, b"x" * 20_000_000)
    path = f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content"
    async with served(world) as clients:
        stream = await clients.connect()
        await stream.send_all(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ANNA}\r\n\r\n".encode()
        )
        await wait_all_tasks_blocked(0.1)

        mock_clock.jump(exchange.WRITE_S + 20_000_000 / exchange.WRITE_BYTES_PER_S_MIN + 1)
        await wait_all_tasks_blocked(0.1)
        received = await _read_all(stream)

    assert received.startswith(b"HTTP/1.1 200")
    assert len(received) < 20_000_000


async def test_a_client_that_sends_all_of_a_refused_body_receives_the_refusal(
    world: World,
) -> None:
    body = b'{"tasks":[' + b'"",' * 3_000_000
    async with served(world) as clients:
        stream = await clients.connect()
        with trio.fail_after(30):
            await stream.send_all((POST % len(body)).encode() + body)
            received = await _read_all(stream)

    assert received.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in received


async def test_a_refused_body_that_never_ends_does_not_hold_its_connection(
    world: World, mock_clock: MockClock
) -> None:
    async with served(world) as clients:
        stream = await clients.connect()
        await stream.send_all(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nx")
        await wait_all_tasks_blocked(0.05)
        mock_clock.jump(exchange.WAIT_TIMEOUT_S + 0.01)
        received = await _read_all(stream)
        await wait_all_tasks_blocked(0.05)

        mock_clock.jump(connection.DRAIN_S + 1)
        await wait_all_tasks_blocked(0.05)
        await stream.send_all(b"more")  # The first write after the close is answered with a reset.
        await wait_all_tasks_blocked(0.05)
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"more")

    assert received.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in received


async def test_the_server_stops_within_its_grace_whatever_is_connected(world: World) -> None:
    partial = (POST % 1_000_000).encode() + b'{"tasks":[' + b'"",' * 1000
    with trio.fail_after(30):
        async with served(world) as clients:
            streams = [await clients.connect() for _ in range(4)]
            await streams[1].send_all(b"GET /heal")
            await streams[2].send_all(partial)
            await streams[3].send_all(HEALTH)
            await wait_all_tasks_blocked(0.05)


async def test_an_accept_without_free_descriptors_is_repeated_and_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Exhausted:
        """A listening socket whose first accepts find no descriptor."""

        def __init__(self, inner: trio.SocketListener) -> None:
            self.inner = inner
            self.socket = self
            self.failures_left = 3

        async def accept(self) -> tuple[trio.socket.SocketType, object]:
            if self.failures_left:
                self.failures_left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return await self.inner.socket.accept()

        async def aclose(self) -> None:
            await self.inner.aclose()

    async def work(run: object) -> None:
        await run()  # type: ignore[operator]

    listening = trio.socket.socket()
    await listening.bind(("127.0.0.1", 0))
    listening.listen()
    clients = Clients(listening.getsockname()[1])
    exhausted = Exhausted(trio.SocketListener(listening))
    listener = Listener(world.app, connections_max=9, run_connection=work)  # type: ignore[arg-type]
    stop = trio.Event()
    with caplog.at_level(logging.WARNING):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: listener.serve([exhausted], stop, grace_s=1.0)  # type: ignore[list-item]
            )
            with trio.fail_after(20):
                answer = await _ask(await clients.connect())
            stop.set()
    await clients.close()

    assert answer.startswith(b"HTTP/1.1 200")
    assert [record.message for record in caplog.records] == ["no connection can be accepted"]
    assert caplog.records[0].exc_info is None


async def test_a_sender_has_to_wait_while_its_body_is_not_consumed() -> None:
    ours, theirs = trio.socket.socketpair()
    head = parse_head(b"PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 90000000")
    one = exchange.Exchange(trio.SocketStream(ours), head, bytearray(), is_stopping=lambda: False)
    scope = one.make_scope(("127.0.0.1", 1), ("127.0.0.1", 2))
    sizes: list[int] = []

    async def receive_all() -> None:
        while True:
            sizes.append(len((await one.receive())["body"]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.SocketStream(theirs).send_all, bytes(90_000_000))
        nursery.start_soon(receive_all)
        await wait_all_tasks_blocked(0.05)
        untaken = sum(sizes)
        scope[exchange.BODY_TAKEN](untaken)
        await wait_all_tasks_blocked(0.05)
        taken_once = sum(sizes)
        nursery.cancel_scope.cancel()
    ours.close()
    theirs.close()

    assert untaken > exchange.UNTAKEN_BYTES_MAX
    assert untaken <= exchange.UNTAKEN_BYTES_MAX + exchange.READ_BYTES
    assert untaken < taken_once <= untaken + exchange.UNTAKEN_BYTES_MAX + exchange.READ_BYTES
