"""The connection pool: connections are kept, reused, limited and closed."""

from __future__ import annotations

import gc

import pytest
import trio
import trio.testing

from conveyor.http_client.errors import ConnectFailed, ConnectionLost, NoMemoryForBody, TimedOut
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import connect
from tests.http_client.conftest import ALL_LARGE, MakePool, get, target
from tests.http_client.server import Peer, answering, answering_then_closing, raw_server, reply


async def test_a_page_is_returned_with_its_status_headers_and_body(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"hello", headers={"X-Kind": "greeting"}))) as server:
        response = await pool.fetch(get(server.url("/a?b=c")))

    assert (response.status, response.body) == (200, b"hello")
    assert response.header(b"x-kind") == "greeting"
    assert server.requests[0].startswith(b"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_one_connection_serves_many_requests_in_turn(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"x" * 20_000))) as server:
        for _ in range(20):
            assert len((await pool.fetch(get(server.url()))).body) == 20_000

        assert server.connections == 1
        assert pool.idle_count == 1


@pytest.mark.parametrize(
    "answer",
    [
        reply(b"bye", headers={"Connection": "close"}),
        b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nbye",
        reply(b"bye") + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        reply(b"bye") + reply(b""),
        reply(b"bye") + b"garbage",
        b"HTTP/1.1 204 No Content\r\n\r\nevil",
    ],
)
async def test_a_connection_is_not_reused_if_it_ended_before_or_after_its_response(
    pool: HttpPool, answer: bytes
) -> None:
    async with raw_server(answering(answer)) as server:
        first = await pool.fetch(get(server.url()))
        second = await pool.fetch(get(server.url()))

    assert server.connections == 2
    assert first.body == second.body != b"evil"


async def test_bytes_sent_on_an_idle_connection_are_never_taken_for_a_response(
    pool: HttpPool,
) -> None:
    sent = trio.Event()
    go_on = trio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"honest"))
        if peer.server.connections == 1:
            await go_on.wait()
            await peer.send(reply(b"poison"))
            sent.set()
        await peer.wait_closed()

    async with raw_server(handler) as server:
        await pool.fetch(get(server.url()))
        go_on.set()
        await sent.wait()
        response = await pool.fetch(get(server.url()))

    assert response.body == b"honest"
    assert server.connections == 2


async def test_a_get_is_repeated_if_its_kept_connection_was_closed(pool: HttpPool) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"ok"))
        if peer.server.connections == 1:
            await peer.request()
            peer.abort()
        else:
            await peer.wait_closed()

    async with raw_server(handler) as server:
        await pool.fetch(get(server.url()))
        response = await pool.fetch(get(server.url()))

    assert response.body == b"ok"
    assert server.connections == 2
    assert len(server.requests) == 3


async def test_a_post_is_not_repeated_if_its_connection_closes_without_an_answer(
    pool: HttpPool,
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"ok"))
        await peer.request()

    async with raw_server(handler) as server:
        await pool.fetch(get(server.url()))
        post = Request(method="POST", target=target(server.url()), body=b"once", deadline_s=5)
        with pytest.raises(ConnectionLost):
            await pool.fetch(post)

    assert server.connections == 1
    assert server.requests[1].endswith(b"Content-Length: 4\r\n\r\nonce")


async def test_a_post_uses_a_new_connection_if_the_kept_one_was_closed_before(
    pool: HttpPool,
) -> None:
    async with raw_server(answering_then_closing(reply(b"ok"))) as server:
        await pool.fetch(get(server.url()))
        while server.closed < 1:
            await trio.sleep(0.001)
        post = Request(method="POST", target=target(server.url()), body=b"once", deadline_s=5)
        response = await pool.fetch(post)

    assert response.body == b"ok"
    assert server.connections == 2


async def test_a_cancelled_fetch_closes_its_connection(pool: HttpPool) -> None:
    arrival = trio.Event()
    gone = trio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        arrival.set()
        await peer.wait_closed()
        gone.set()

    async with raw_server(handler) as server, trio.open_nursery() as nursery:
        nursery.start_soon(pool.fetch, get(server.url()))
        await arrival.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await gone.wait()

    assert pool.origin_count == 0


async def test_a_deadline_ends_a_slow_response_and_closes_its_connection(pool: HttpPool) -> None:
    gone = trio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        try:
            while True:
                await peer.send(b".")
                await trio.sleep(0.005)
        finally:
            gone.set()

    async with raw_server(handler) as server:
        with pytest.raises(TimedOut):
            await pool.fetch(get(server.url(), deadline_s=0.05))
        await gone.wait()


async def test_a_peer_that_sends_nothing_ends_a_fetch_long_before_its_deadline(
    make_pool: MakePool,
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.wait_closed()

    async with raw_server(handler) as server:
        with pytest.raises(TimedOut):
            await make_pool(read_timeout_s=0.03).fetch(get(server.url(), deadline_s=1e6))


async def test_a_wait_for_a_large_body_permit_ends_at_the_deadline_only(
    make_pool: MakePool,
) -> None:
    read_timeout_s = 0.3  # On a busy machine the sender may be ten times slower.
    large = b"x" * 500_000
    arrival, release = trio.Event(), trio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"." * 20_000)
        arrival.set()
        while not release.is_set():
            await peer.send(b".")
            await trio.sleep(0.01)
        await peer.send(b"." * 100_000)

    pool = make_pool(read_timeout_s=read_timeout_s, large_bodies_bytes_max=100_000, **ALL_LARGE)
    async with (
        raw_server(slow) as one,
        raw_server(answering(reply(large))) as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(pool.fetch, get(one.url()))
        await arrival.wait()
        with pytest.raises(NoMemoryForBody):
            await pool.fetch(get(other.url(), deadline_s=read_timeout_s * 2))

        async def go_on() -> None:
            await trio.sleep(read_timeout_s * 1.2)
            release.set()

        nursery.start_soon(go_on)
        assert (await pool.fetch(get(other.url()))).body == large


async def test_a_peer_that_reads_nothing_of_a_large_request_is_given_up(
    make_pool: MakePool,
) -> None:
    async def handler(peer: Peer) -> None:
        await trio.sleep_forever()

    async with raw_server(handler) as server:
        post = Request(method="POST", target=target(server.url()), body=b"x" * 50_000_000)
        with pytest.raises(TimedOut):
            await make_pool(read_timeout_s=0.03).fetch(post)


async def test_a_refused_connection_has_an_error_of_its_own(pool: HttpPool) -> None:
    async with raw_server(answering(reply())) as server:
        url = server.url()

    with pytest.raises(ConnectFailed, match="connection refused"):
        await pool.fetch(get(url))


async def test_the_connections_per_origin_are_limited(make_pool: MakePool) -> None:
    open_now = [0, 0]
    release = trio.Event()

    async def handler(peer: Peer) -> None:
        while await peer.request():
            open_now[0] += 1
            open_now[1] = max(open_now)
            await release.wait()
            open_now[0] -= 1
            await peer.send(reply(b"x"))

    async with raw_server(handler) as server:
        pool = make_pool(connections_per_origin_max=3)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(pool.fetch, get(server.url()))
            while open_now[0] < 3:
                await trio.sleep(0.001)
            release.set()

    assert open_now[1] == 3
    assert server.connections == 3
    assert len(server.requests) == 10


async def test_an_idle_connection_is_closed_to_make_room_for_another_origin(
    make_pool: MakePool,
) -> None:
    pool = make_pool(connections_max=2)
    async with (
        raw_server(answering(reply(b"1"))) as one,
        raw_server(answering(reply(b"2"))) as two,
        raw_server(answering(reply(b"3"))) as three,
    ):
        for server in (one, two, three):
            await pool.fetch(get(server.url()))

        assert pool.idle_count == 2
        assert pool.origin_count == 2
        await pool.fetch(get(three.url()))
        assert three.connections == 1


async def test_an_expired_idle_connection_is_not_reused(make_pool: MakePool) -> None:
    pool = make_pool(keep_alive_s=0.0)
    async with raw_server(answering(reply(b"x"))) as server:
        await pool.fetch(get(server.url()))
        await pool.fetch(get(server.url()))

    assert server.connections == 2


async def test_a_wait_for_a_connection_slot_counts_towards_the_deadline(
    make_pool: MakePool,
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.wait_closed()

    pool = make_pool(connections_per_origin_max=1)
    async with raw_server(handler) as server, trio.open_nursery() as nursery:
        nursery.start_soon(pool.fetch, get(server.url()))
        while not server.requests:
            await trio.sleep(0.001)
        with pytest.raises(TimedOut):
            await pool.fetch(get(server.url(), deadline_s=0.02))
        nursery.cancel_scope.cancel()

    assert len(server.requests) == 1


async def test_proxy_variables_of_the_environment_are_ignored(
    pool: HttpPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw_server(answering(reply(b"direct"))) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        response = await pool.fetch(get(server.url()))

    assert response.body == b"direct"


async def test_a_full_pool_delays_other_origins_and_then_serves_them(
    make_pool: MakePool,
) -> None:
    arrival, release = trio.Event(), trio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        arrival.set()
        await release.wait()
        await peer.send(reply(b"slow"))

    pool = make_pool(connections_max=1, connections_per_origin_max=1)
    async with (
        raw_server(slow) as crowded,
        raw_server(answering(reply(b"quick"))) as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(pool.fetch, get(crowded.url()))
        await arrival.wait()
        with pytest.raises(TimedOut):
            await pool.fetch(get(other.url(), deadline_s=0.01))
        assert pool.origin_count == 1
        for _ in range(3):
            nursery.start_soon(pool.fetch, get(other.url()))
        await trio.testing.wait_all_tasks_blocked()
        assert other.connections == 0

        release.set()

    assert len(other.requests) == 3


async def test_a_connect_that_is_cancelled_leaves_no_socket_open() -> None:
    opened: list[int] = []
    async with raw_server(answering(reply())) as server:
        with trio.CancelScope() as scope:
            scope.cancel()
            opened.append((await connect("127.0.0.1", server.port)).fileno())
        gc.collect()

    assert scope.cancelled_caught
    assert opened == []
