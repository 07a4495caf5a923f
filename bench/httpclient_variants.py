"""The clients that `bench httpclient` compares; each runs alone in its own process.

`python -m bench.httpclient_variants NAME URL COUNT INFLIGHT CA` prints the CPU microseconds that
this process used per request. Connections are opened before the measurement starts. CA is a file,
or empty.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import trio

from conveyor.domain.submit.target import Target, TargetPolicy, parse_url
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls

BODY_BYTES = 20_000

Work = Callable[[Iterator[int]], Awaitable[None]]


async def pool(url: str, count: int, inflight: int, ca: str) -> float:
    tls = default_tls()
    if ca:
        tls.load_verify_locations(ca)
    limits = PoolLimits(connections_max=inflight, connections_per_origin_max=inflight)
    pool = HttpPool(TargetPolicy(allow_private=True), limits, tls=tls)
    target = parse_url(url)
    assert isinstance(target, Target)
    request = Request(method="GET", target=target, headers=(("User-Agent", "bench"),))

    async def work(numbers: Iterator[int]) -> None:
        for _ in numbers:
            assert len((await pool.fetch(request)).body) == BODY_BYTES

    spent_us = await _on_trio(work, count, inflight)
    pool.close()
    return spent_us


async def aiohttp_on_uvloop(url: str, count: int, inflight: int, ca: str) -> float:
    import aiohttp

    connector = aiohttp.TCPConnector(
        limit=inflight, ssl=ssl.create_default_context(cafile=ca) if ca else True
    )
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:

        async def work(numbers: Iterator[int]) -> None:
            for _ in numbers:
                async with session.get(url) as response:
                    assert len(await response.read()) == BODY_BYTES

        await asyncio.gather(*(work(iter((0,))) for _ in range(inflight)))
        numbers = iter(range(count))
        started_at = time.process_time()
        await asyncio.gather(*(work(numbers) for _ in range(inflight)))
        return (time.process_time() - started_at) / count * 1e6


async def httpx_on_trio(url: str, count: int, inflight: int, ca: str) -> float:
    import httpx

    limits = httpx.Limits(max_connections=inflight, max_keepalive_connections=inflight)
    async with httpx.AsyncClient(
        limits=limits,
        timeout=120,
        trust_env=False,
        verify=ssl.create_default_context(cafile=ca) if ca else True,
    ) as client:

        async def work(numbers: Iterator[int]) -> None:
            for _ in numbers:
                assert len((await client.get(url)).content) == BODY_BYTES

        return await _on_trio(work, count, inflight)


async def _on_trio(work: Work, count: int, inflight: int) -> float:
    async with trio.open_nursery() as nursery:
        for _ in range(inflight):
            nursery.start_soon(work, iter((0,)))
    numbers = iter(range(count))
    started_at = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(inflight):
            nursery.start_soon(work, numbers)
    return (time.process_time() - started_at) / count * 1e6


def measure(name: str, url: str, count: int, inflight: int, ca: str) -> float:
    match name:
        case "pool":
            return trio.run(pool, url, count, inflight, ca)
        case "aiohttp":
            import uvloop

            return float(uvloop.run(aiohttp_on_uvloop(url, count, inflight, ca)))
        case "httpx":
            return trio.run(httpx_on_trio, url, count, inflight, ca)
        case _:
            raise ValueError(name)


if __name__ == "__main__":
    client, address, requests, at_once, authority = sys.argv[1:]
    print(measure(client, address, int(requests), int(at_once), authority))
