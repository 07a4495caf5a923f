"""A connection is reused only for the same caller, and only if no response on it is outstanding."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from conveyor.http_client.errors import TimedOut
from conveyor.http_client.exchange import Request, Upload
from conveyor.http_client.pool import HttpPool
from tests.http_client.conftest import MakePool, get, target
from tests.http_client.server import Peer, answering, raw_server, reply


def post(url: str, body: bytes | None, **fields: object) -> Request:
    return Request(method="POST", target=target(url), body=body, deadline_s=5.0, **fields)  # type: ignore[arg-type]


async def test_two_callers_never_share_a_connection(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"page"))) as server:
        for partition in ("a", "b", "a", "b"):
            await pool.fetch(get(server.url(), partition=partition))

        assert server.connections == 2
        assert (pool.idle_count, pool.origin_count) == (2, 2)


async def test_the_late_answer_to_one_caller_never_reaches_another(pool: HttpPool) -> None:
    """The site takes the attacker's body for a request, and answers it after the victim's
    request."""
    victim_asked = trio.Event()

    async def handler(peer: Peer) -> None:
        while sent := await peer.request():
            if sent.startswith(b"GET"):
                victim_asked.set()
                await trio.sleep(0.02)
                await peer.send(reply(b"mine"))
            else:
                await peer.send(reply(b"first"))
                await victim_asked.wait()
                await peer.send(reply(b"planted"))

    async with raw_server(handler) as server:
        await pool.fetch(post(server.url(), b"GET /x HTTP/1.1\r\n\r\n", partition="attacker"))
        response = await pool.fetch(get(server.url(), partition="victim"))

    assert response.body == b"mine"


@pytest.mark.parametrize(("is_trusted", "connections"), [(False, 2), (True, 1)])
async def test_a_connection_is_reused_after_a_request_with_a_body_only_at_a_trusted_peer(
    make_pool: MakePool, is_trusted: bool, connections: int
) -> None:
    pool = make_pool(trusts_peers=is_trusted)
    async with raw_server(answering(reply(b"ok"))) as server:
        await pool.fetch(post(server.url(), b"body"))
        await pool.fetch(get(server.url()))

        assert server.connections == connections


async def test_a_connection_is_closed_after_a_streamed_upload(pool: HttpPool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"body"

    async with (
        raw_server(answering(reply(b"ok"))) as server,
        pool.open(post(server.url(), None), Upload(pieces(), 4)) as incoming,
    ):
        assert [piece async for piece in incoming] == [b"ok"]

    assert pool.idle_count == 0


async def test_a_connection_is_closed_if_the_response_came_before_the_whole_request(
    make_pool: MakePool,
) -> None:
    """Even a trusted peer may answer too early, and how it treats the rest of the request is
    unknown."""
    pool = make_pool(trusts_peers=True)
    answered = trio.Event()

    async def handler(peer: Peer) -> None:
        await peer.stream.receive_some(65536)
        await peer.send(reply(b"too soon"))
        answered.set()
        await peer.wait_closed()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"bo"
        await answered.wait()
        yield b"dy"

    async with (
        raw_server(handler) as server,
        pool.open(post(server.url(), None), Upload(pieces(), 4)) as incoming,
    ):
        assert [piece async for piece in incoming] == [b"too soon"]

    assert pool.idle_count == 0


@pytest.mark.parametrize(
    "answer",
    [
        reply(b""),
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n",
        reply(b"a body"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\na body\r\n0\r\n\r\n",
        reply(reply(b"a response as a body")),
    ],
)
async def test_a_connection_is_not_reused_after_head(pool: HttpPool, answer: bytes) -> None:
    async with raw_server(answering(answer, reply(b"page"))) as server:
        head = Request(method="HEAD", target=target(server.url()), deadline_s=5.0)
        assert (await pool.fetch(head)).body == b""
        assert pool.idle_count == 0


async def test_a_late_body_after_head_is_not_taken_for_the_next_response(
    make_pool: MakePool,
) -> None:
    """The connection to a trusted peer is kept after HEAD; bytes that follow are noticed before it
    is reused."""
    pool = make_pool(trusts_peers=True)
    is_late = trio.Event()

    async def handler(peer: Peer) -> None:
        while sent := await peer.request():
            if sent.startswith(b"HEAD"):
                await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
                await is_late.wait()
                await peer.send(b"the body")
            else:
                await peer.send(reply(b"page"))

    async with raw_server(handler) as server:
        await pool.fetch(Request(method="HEAD", target=target(server.url()), deadline_s=5.0))
        is_late.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (await pool.fetch(get(server.url()))).body == b"page"

    assert server.connections == 2


@pytest.mark.parametrize("interim", ["100 Continue", "102 Processing", "103 Early Hints"])
async def test_a_connection_is_not_reused_after_an_interim_response(
    pool: HttpPool, interim: str
) -> None:
    answer = f"HTTP/1.1 {interim}\r\n\r\n".encode() + reply(b"page")
    async with raw_server(answering(answer)) as server:
        assert (await pool.fetch(get(server.url()))).body == b"page"
        assert pool.idle_count == 0


async def test_connections_to_a_site_that_answered_twice_are_used_for_one_request(
    pool: HttpPool,
) -> None:
    """A surplus response that arrives at the right time cannot be told from the next one, so reuse
    is avoided."""

    async def handler(peer: Peer) -> None:
        while sent := await peer.request():
            await peer.send(reply(sent.split()[1]))
            await trio.sleep(0.001)
            await peer.send(reply(b"surplus"))

    async with raw_server(handler) as server:
        await pool.fetch(get(server.url("/first")))
        await trio.sleep(0.03)
        bodies = [(await pool.fetch(get(server.url(f"/{number}")))).body for number in range(10)]

    assert bodies == [b"/%d" % number for number in range(10)]
    assert server.connections == 11


@pytest.mark.parametrize("ending", [b"HTTP/1.1 200 OK\r\n", b"garbage"])
async def test_surplus_bytes_after_a_response_close_all_kept_connections_of_the_origin(
    pool: HttpPool, ending: bytes
) -> None:
    async def handler(peer: Peer) -> None:
        while sent := await peer.request():
            await peer.send(reply(b"page") + (ending if b"/odd" in sent else b""))

    async with raw_server(handler) as server:
        await pool.fetch(get(server.url("/")))
        await pool.fetch(get(server.url("/odd")))
        await pool.fetch(get(server.url("/"), partition="another"))
        for _ in range(2):
            await pool.fetch(get(server.url("/")))

    assert server.connections == 4
    assert pool.idle_count == 1


async def test_idle_connections_are_closed_in_time_without_other_activity(
    make_pool: MakePool,
) -> None:
    pool = make_pool(keep_alive_s=0.03)
    async with raw_server(answering(reply(b"page"))) as server:
        for partition in ("a", "b"):
            await pool.fetch(get(server.url(), partition=partition))
        assert pool.idle_count == 2
        while server.closed < 2:
            await trio.sleep(0.001)

    assert (pool.idle_count, pool.origin_count) == (0, 0)


async def test_a_timeout_in_a_full_pool_frees_its_slot_of_the_origin(
    make_pool: MakePool,
) -> None:
    """The first request waits for the pool and has the only slot of the origin; the second waits
    for that slot."""
    release = trio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        await release.wait()
        await peer.send(reply(b"slow"))

    pool = make_pool(connections_max=1, connections_per_origin_max=1)
    bodies: list[bytes] = []

    async def fetch(url: str, deadline_s: float) -> None:
        bodies.append((await pool.fetch(get(url, deadline_s=deadline_s))).body)

    async with (
        raw_server(slow) as crowded,
        raw_server(answering(reply(b"quick"))) as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(fetch, crowded.url(), 5.0)
        while not crowded.requests:
            await trio.sleep(0.001)
        async with trio.open_nursery() as waiting:
            waiting.start_soon(expect_timeout, pool, other.url())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(fetch, other.url(), 5.0)
            await trio.testing.wait_all_tasks_blocked()
        release.set()

    assert sorted(bodies) == [b"quick", b"slow"]
    assert pool.origin_count <= 2


async def expect_timeout(pool: HttpPool, url: str) -> None:
    with pytest.raises(TimedOut):
        await pool.fetch(get(url, deadline_s=0.05))


async def test_a_cancelled_wait_in_a_full_pool_keeps_no_slot(make_pool: MakePool) -> None:
    pool = make_pool(connections_max=2, connections_per_origin_max=1)
    async with raw_server(answering(reply(b"page"))) as server:
        for _ in range(5):
            origin = pool._slots.acquire_nowait(("a", target(server.url()).origin))
            assert origin is not None
            with trio.move_on_after(0.001) as scope:
                await pool.fetch(get(server.url(), partition="a"))
            assert scope.cancelled_caught
            pool._slots.release(origin)

        assert (await pool.fetch(get(server.url(), partition="a"))).body == b"page"
