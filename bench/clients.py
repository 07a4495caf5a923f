"""Measures the CPU time that each client of the SDK needs to download 10,000 results.

One `conveyor dev` fetches a list once. Then each client lists the results and downloads every body
with `download_all`, in its own process, one client after the other. The arm `httpx` is the asyncio
client without its connection pool: sixteen calls of `download` at a time. The figure is the CPU
time of the client's process without its imports.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import trio

from bench.million import running_server
from bench.origin import running_origin
from conveyor.sdk import AsyncioClient, Client, TrioClient

KEY = "bench"
ARMS = ("trio", "asyncio", "sync", "httpx")
_AT_ONCE = 16


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench clients", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    os.environ |= {
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
        "CONVEYOR_QUOTA_REQUESTS_PER_S": "100000",
    }
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name,
        running_origin(size_bytes=20_000, think_s=0.0) as site,
        running_server(Path(name)) as (url, _),
    ):
        job = scrape(url, site, options.tasks)
        for _ in range(options.rounds):
            for arm in ARMS:
                times[arm].append(run_arm(arm, url, job))
    figures = {f"{arm}: CPU s": median(times[arm]) for arm in ARMS} | {
        f"{arm} / trio": median(
            round_cpu_s / base for round_cpu_s, base in zip(times[arm], times["trio"], strict=True)
        )
        for arm in ARMS[1:]
    }
    for label, value in figures.items():
        print(f"{label:20}{value:>10,.2f}")
    if options.json:
        print(msgspec.json.encode({k: round(v, 3) for k, v in figures.items()}).decode())


def scrape(url: str, site: str, count: int) -> str:
    """Submits a job of `count` pages, waits until it has finished, and returns its id."""
    with Client(url, KEY, timeout_s=300) as client:
        job = client.submit([f"{site}/{number}" for number in range(count)])
        assert client.wait(job.job_id).stats.successful == count
    return job.job_id


def run_arm(arm: str, url: str, job_id: str) -> float:
    """Returns the CPU seconds of a download in its own process."""
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        command = [sys.executable, "-m", "bench.clients", arm, url, job_id, folder]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def download(kind: type[AsyncioClient | TrioClient], url: str, job: str, folder: Path) -> int:
    async with kind(url, KEY) as client:
        tasks = [result.task_id async for result in client.results(job)]
        return len(await client.download_all(job, {task: folder / task for task in tasks}))


def download_sync(url: str, job: str, folder: Path) -> int:
    with Client(url, KEY) as client:
        tasks = [result.task_id for result in client.results(job)]
        return len(client.download_all(job, {task: folder / task for task in tasks}))


async def download_singly(url: str, job: str, folder: Path) -> int:
    async with AsyncioClient(url, KEY) as client:
        tasks = [result.task_id async for result in client.results(job)]
        rest = iter(tasks)

        async def work() -> None:
            for task in rest:
                await client.download(job, task, folder / task)

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        return len(tasks)


def child(arm: str, url: str, job: str, folder: Path) -> None:
    loops: dict[str, Callable[[], int]] = {
        "trio": lambda: trio.run(download, TrioClient, url, job, folder),
        "asyncio": lambda: asyncio.run(download(AsyncioClient, url, job, folder)),
        "sync": lambda: download_sync(url, job, folder),
        "httpx": lambda: asyncio.run(download_singly(url, job, folder)),
    }
    before = _cpu_s()
    loops[arm]()
    print(_cpu_s() - before)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
