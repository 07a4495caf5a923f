"""What does one request cost, in CPU, as the number in flight grows: our pool, aiohttp, httpx?

20 KB pages from one local origin without think time; each client in a process of its own. httpx is
left out where it would take minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import trio

from bench.figure import Panel, draw
from bench.origin import an_origin
from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.urls import Target, parse_url
from conveyor.net.message import Request
from conveyor.net.pool import HttpPool
from conveyor.net.slots import PoolLimits

RESULTS = Path(__file__).parent / "results"
FLIGHTS = (1, 16, 64, 200, 1_000)
HTTPX_FLIGHTS_MAX = 200
CLIENTS = ("pool", "aiohttp", "httpx")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench httpclient", description=__doc__)
    parser.add_argument("--n", type=int, default=6_000, help="requests per point")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with an_origin(size_bytes=20_000, think_s=0.0) as url:
        table = {
            client: {
                inflight: _best(client, url, _count(client, options.n), inflight, options.rounds)
                for inflight in FLIGHTS
                if client != "httpx" or inflight <= HTTPX_FLIGHTS_MAX
            }
            for client in CLIENTS
        }
    _show(table)
    panels = [
        Panel(
            f"{inflight:,} in flight",
            [(c, row[inflight]) for c, row in table.items() if inflight in row],
            "us",
        )
        for inflight in FLIGHTS
    ]
    draw(RESULTS / "httpclient.svg", "CPU per request (20 KB)", panels)
    if options.json:
        print(msgspec.json.encode(table).decode())


def _count(client: str, count: int) -> int:
    return count // 20 if client == "httpx" else count


def _best(client: str, url: str, count: int, inflight: int, rounds: int) -> float:
    command = [sys.executable, "-m", "bench.httpclient", client, url, str(count), str(inflight)]
    runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE) for _ in range(rounds)]
    return min(float(run.stdout) for run in runs)


def _show(table: dict[str, dict[int, float]]) -> None:
    print("CPU us per request" + "".join(f"{inflight:>9,}" for inflight in FLIGHTS))
    for client, row in table.items():
        cells = "".join(
            f"{row[inflight]:>9.0f}" if inflight in row else f"{'-':>9}" for inflight in FLIGHTS
        )
        print(f"{client:18}{cells}")
    ours = table["pool"]
    for client in CLIENTS[1:]:
        cells = "".join(
            f"{ours[inflight] / table[client][inflight]:>8.2f}x"
            if inflight in table[client]
            else f"{'-':>9}"
            for inflight in FLIGHTS
        )
        print(f"pool to {client:10}{cells}")
    print(f"pool, 1,000 to 16  {ours[1_000] / ours[16]:.2f}x")


async def _pool(url: str, count: int, inflight: int) -> float:
    pool = HttpPool(
        TargetPolicy(allow_private=True),
        PoolLimits(connections_max=inflight, connections_per_origin_max=inflight),
    )
    target = parse_url(url)
    assert isinstance(target, Target)
    request = Request(method="GET", target=target, headers=(("User-Agent", "bench"),))
    numbers = iter(range(count))

    async def work() -> None:
        for _ in numbers:
            response = await pool.fetch(request)
            assert len(response.body) == 20_000

    started_at = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(inflight):
            nursery.start_soon(work)
    pool.close()
    return (time.process_time() - started_at) / count * 1e6


async def _aiohttp(url: str, count: int, inflight: int) -> float:
    import aiohttp

    numbers = iter(range(count))

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in numbers:
            async with session.get(url) as response:
                assert len(await response.read()) == 20_000

    connector = aiohttp.TCPConnector(limit=inflight)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        started_at = time.process_time()
        await asyncio.gather(*(work(session) for _ in range(inflight)))
        return (time.process_time() - started_at) / count * 1e6


async def _httpx(url: str, count: int, inflight: int) -> float:
    import httpx

    numbers = iter(range(count))
    limits = httpx.Limits(max_connections=inflight, max_keepalive_connections=inflight)

    async def work(client: httpx.AsyncClient) -> None:
        for _ in numbers:
            assert len((await client.get(url)).content) == 20_000

    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as client:
        started_at = time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(inflight):
                nursery.start_soon(work, client)
        return (time.process_time() - started_at) / count * 1e6


def _one(client: str, url: str, count: int, inflight: int) -> float:
    if client == "aiohttp":
        import uvloop

        return float(uvloop.run(_aiohttp(url, count, inflight)))
    return trio.run(_pool if client == "pool" else _httpx, url, count, inflight)


if __name__ == "__main__":
    name, address, requests, at_once = sys.argv[1:]
    print(_one(name, address, int(requests), int(at_once)))
