"""An httpx client on the pool: the same answers, and the same SSRF guard."""

from __future__ import annotations

import gzip
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import httpx
import pytest
import trio

from conveyor.http_client.httpx_transport import PoolTransport
from conveyor.http_client.pool import HttpPool
from tests.http_client.conftest import MakePool
from tests.http_client.server import Peer, answering, raw_server, reply


async def test_an_httpx_client_reads_a_compressed_page(pool: HttpPool) -> None:
    page = gzip.compress(b"hello")
    answer = reply(page, headers={"Content-Encoding": "gzip", "X-Kind": "a"})
    async with (
        raw_server(answering(answer)) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        response = await client.post(server.url("/x?y=1"), json={"a": 1}, headers={"X-Me": "1"})

    assert (response.status_code, response.content) == (200, b"hello")
    assert response.headers["x-kind"] == "a"
    assert server.requests[0].endswith(b'\r\n\r\n{"a":1}')
    assert server.requests[0].lower().count(b"content-length") == 1


async def test_an_httpx_client_cannot_reach_what_the_policy_forbids(make_pool: MakePool) -> None:
    pool = make_pool(allow_private=False)
    async with (
        raw_server(answering(reply(b"secret"))) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        with pytest.raises(httpx.ConnectError):
            await client.get(server.url())

    assert server.connections == 0


async def test_errors_of_the_pool_are_raised_as_errors_of_httpx(pool: HttpPool) -> None:
    async with (
        raw_server(answering(b"nonsense\r\n\r\n")) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url())


async def test_a_body_is_streamed_as_it_arrives_and_its_connection_is_reused(
    pool: HttpPool,
) -> None:
    was_read = trio.Event()

    async def halting(peer: Peer) -> None:
        while await peer.request():
            await peer.send(reply(b"12345678")[:-4])
            with trio.fail_after(5):
                await was_read.wait()
            await peer.send(b"5678")

    async with (
        raw_server(halting) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        async with client.stream("GET", server.url()) as response:
            pieces = response.aiter_raw()
            first = await anext(pieces)
            was_read.set()
            rest = b"".join([piece async for piece in pieces])
        await client.get(server.url())

    assert (first, rest) == (b"1234", b"5678")
    assert server.connections == 1


async def test_a_connection_is_closed_if_its_body_is_not_read_to_the_end(pool: HttpPool) -> None:
    left = trio.Event()

    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await peer.wait_closed()
        left.set()

    async with (
        raw_server(endless) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        async with client.stream("GET", server.url()) as response:
            assert response.status_code == 200
        with trio.fail_after(5):
            await left.wait()

    assert pool.idle_count == 0


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_the_size_limit_of_a_streamed_body_applies_to_its_decoded_size(
    pool: HttpPool, encoding: str
) -> None:
    page = bytes(range(256)) * 40
    body = gzip.compress(page) if encoding == "gzip" else page
    answer = reply(body, headers={"Content-Encoding": encoding})
    async with (
        raw_server(answering(answer)) as server,
        httpx.AsyncClient(transport=PoolTransport(pool, body_bytes_max=len(page) - 1)) as small,
        httpx.AsyncClient(transport=PoolTransport(pool, body_bytes_max=len(page))) as large,
    ):
        with pytest.raises(httpx.RemoteProtocolError, match="larger"):
            await small.get(server.url())

        assert (await large.get(server.url())).content == page


async def test_the_read_timeout_of_httpx_applies(pool: HttpPool) -> None:
    async def silent(peer: Peer) -> None:
        await peer.request()
        await peer.wait_closed()

    timeout = httpx.Timeout(20.0, read=0.05)
    async with (
        raw_server(silent) as server,
        httpx.AsyncClient(transport=PoolTransport(pool), timeout=timeout) as client,
    ):
        with pytest.raises(httpx.ReadTimeout):
            await client.get(server.url())


async def test_a_body_of_known_length_is_sent_in_pieces(pool: HttpPool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async with (
        raw_server(answering(reply(b"taken"))) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        await client.put(server.url(), content=pieces(), headers={"Content-Length": "7"})

    assert server.requests[0].endswith(b"\r\n\r\none two")


async def test_an_unknown_encoding_in_the_answer_to_head_is_no_error(pool: HttpPool) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\nContent-Encoding: odd\r\n\r\n"
    async with (
        raw_server(answering(head)) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        assert (await client.head(server.url())).content == b""


async def test_an_answer_that_arrives_before_the_whole_body_was_sent_is_returned(
    pool: HttpPool,
) -> None:
    async def refusing(peer: Peer) -> None:
        await peer.stream.receive_some(1000)
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        peer.abort()

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(1000):
            yield bytes(65536)

    length = {"Content-Length": str(65536 * 1000)}
    async with (
        raw_server(refusing) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
        aclosing(pieces()) as content,
    ):
        response = await client.put(server.url(), content=content, headers=length)

    assert (response.status_code, response.content) == (413, b"no")


async def test_a_get_is_repeated_if_its_kept_connection_was_closed(pool: HttpPool) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply(b"one"))
        await peer.request()

    async with (
        raw_server(once) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        bodies = [(await client.get(server.url())).content for _ in range(2)]

    assert bodies == [b"one"] * 2
    assert (server.connections, len(server.requests)) == (2, 3)
