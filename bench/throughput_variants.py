"""The arms that `bench throughput` compares; each runs alone in its own process.

`python -m bench.throughput_variants NAME URL COUNT CONCURRENCY FOLDER` prints one line of JSON:
pages fetched, seconds, CPU seconds and peak memory, child processes included. All modules of an arm
are imported before its measurement starts; a helper process imports them while the arm runs.
"""

from __future__ import annotations

import asyncio
import importlib
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import trio

from bench.local_run import running_worker, start_run, wait_for_end
from conveyor.config import Settings


class Measured(msgspec.Struct, frozen=True):
    pages: int
    seconds: float
    cpu_s: float
    rss_mb: float

    @property
    def cpu_ms_per_page(self) -> float:
        return self.cpu_s / self.pages * 1000

    @property
    def pages_per_s(self) -> float:
        return self.pages / self.seconds


Arm = Callable[[Iterator[str], int, Path], Awaitable[int]]
# The modules of Conveyor are imported at the top, as other arms need some of them. cryptography is
# imported when the first secret box is created.
_SECRETS = (
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.kdf.hkdf",
)
MODULES = {
    "bare": ("aiohttp", "uvloop"),
    "conveyor": _SECRETS,
    "conveyor-2": _SECRETS,
    "httpx": ("httpx", "httpcore", "anyio"),
}


async def bare(urls: Iterator[str], concurrency: int, folder: Path) -> int:
    """Fetches with aiohttp on uvloop and writes a file per body; records no outcome."""
    import aiohttp

    done = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal done
        for url in urls:
            async with session.get(url) as response:
                body = await response.read()
            (folder / str(done)).write_bytes(body)
            done += 1

    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    return done


async def httpx_on_trio(urls: Iterator[str], concurrency: int, folder: Path) -> int:
    """Fetches with httpx's defaults and writes a file per body; records no outcome."""
    import httpx

    done = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done
        for url in urls:
            response = await client.get(url)
            (folder / str(done)).write_bytes(response.content)
            done += 1

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with (
        httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as client,
        trio.open_nursery() as nursery,
    ):
        for _ in range(concurrency):
            nursery.start_soon(work, client)
    return done


async def conveyor(urls: Iterator[str], concurrency: int, folder: Path, processes: int = 1) -> int:
    """Runs a list from submit to completion, durably."""
    settings = Settings(
        data_dir=folder / "data",
        allow_private_targets=True,
        concurrency=concurrency,
        max_inflight=concurrency,
    )
    async with running_worker(settings, role="bench", processes=processes) as world:
        run = await start_run(world.env, list(urls), concurrency=concurrency, attempts=3)
        totals = await wait_for_end(world.env, run)
    return totals.successful


def measure(name: str, url: str, count: int, concurrency: int, folder: Path) -> Measured:
    urls = (f"{url}/{number}" for number in range(count))
    for module in MODULES.get(name, ()):
        importlib.import_module(module)
    cpu, wall = cpu_s(), time.perf_counter()
    match name:
        case "bare":
            import uvloop

            pages = uvloop.run(bare(urls, concurrency, folder))
        case "httpx":
            pages = trio.run(httpx_on_trio, urls, concurrency, folder)
        case "conveyor":
            pages = trio.run(conveyor, urls, concurrency, folder)
        case "conveyor-2":
            pages = trio.run(conveyor, urls, concurrency, folder, 2)
        case _:
            raise ValueError(name)
    assert pages == count, f"{pages} of {count} pages"
    return Measured(pages, time.perf_counter() - wall, cpu_s() - cpu, rss_mb())


def cpu_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def rss_mb() -> float:
    """Returns the peak of this process plus that of its child; no arm has two children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_maxrss for usage in usages) / 1024


if __name__ == "__main__":
    arm, address, count, concurrency, folder = sys.argv[1:]
    measured = measure(arm, address, int(count), int(concurrency), Path(folder))
    print(msgspec.json.encode(measured).decode())
