"""An httpx client on the pool: same answers, same guard."""

from __future__ import annotations

import gzip

import httpx
import pytest

from conveyor.net.httpx_transport import PoolTransport
from conveyor.net.pool import HttpPool
from tests.net.conftest import MakePool
from tests.net.server import answering, raw_server, reply


async def test_an_httpx_client_reads_a_compressed_page_once(pool: HttpPool) -> None:
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


async def test_errors_of_the_pool_are_errors_of_httpx(pool: HttpPool) -> None:
    async with (
        raw_server(answering(b"nonsense\r\n\r\n")) as server,
        httpx.AsyncClient(transport=PoolTransport(pool)) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url())
