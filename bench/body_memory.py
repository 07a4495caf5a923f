"""Measures the memory that 200 bodies of 25 MiB need at the same time, with and without a budget.

One worker with 200 slots on the embedded engine fetches bodies of each size from a site on the same
machine. The arm `budget` has the memory budget for bodies of a container with 2 GB
(CONVEYOR_BODY_MEMORY_MB=1024); the arm `none` has a budget too large to be reached. Each arm runs
in its own process; the figure is its peak resident memory.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import trio

from bench.local_run import running_worker, start_run, wait_for_end
from bench.origin import running_origin
from conveyor.config import Settings
from conveyor.domain import limits

MB = 1024 * 1024
ARMS = {"budget": 1024, "none": limits.BODY_MEMORY_MB_MAX}


class Peak(msgspec.Struct, frozen=True):
    pages: int
    seconds: float
    rss_mb: float


async def fetch_all(url: str, count: int, slots: int, body_memory_mb: int, folder: Path) -> int:
    settings = Settings(
        data_dir=folder,
        allow_private_targets=True,
        concurrency=slots,
        max_inflight=slots,
        body_memory_mb=body_memory_mb,
    )
    urls = [f"{url}/{number}" for number in range(count)]
    async with running_worker(settings, role="bench") as world:
        run = await start_run(world.env, urls, concurrency=slots, attempts=1)
        totals = await wait_for_end(world.env, run)
    return totals.successful


def measure(arm: str, url: str, count: int, slots: int) -> Peak:
    folder = tempfile.mkdtemp(dir=".", prefix=".bench-")
    try:
        command = [sys.executable, "-m", "bench.body_memory", "--arm", arm, "--url", url]
        command += ["--count", str(count), "--slots", str(slots), "--folder", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Peak)
    finally:
        shutil.rmtree(folder)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench body_memory", description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--sizes-kb", type=int, nargs="+", default=[25 * 1024, 900, 20])
    parser.add_argument("--arm", choices=list(ARMS), help="run only this arm")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.url:
        started_at = time.perf_counter()
        mb = ARMS[options.arm]
        pages = trio.run(fetch_all, options.url, options.count, options.slots, mb, options.folder)
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(msgspec.json.encode(Peak(pages, time.perf_counter() - started_at, rss_mb)).decode())
        return
    print("| body | bodies | budget MiB | peak RSS MB | seconds | successful |")
    print("|---|---|---|---|---|---|")
    for size_kb in options.sizes_kb:
        # A response after half a second, so that all slots fetch at the same time.
        with running_origin(size_bytes=size_kb * 1024, think_s=0.5) as url:
            for arm in [options.arm] if options.arm else ARMS:
                peak = measure(arm, url, options.count, options.slots)
                budget = ARMS[arm] if arm == "budget" else "none"
                print(
                    f"| {size_kb:,} KiB | {options.count} | {budget} | {peak.rss_mb:,.0f} "
                    f"| {peak.seconds:.1f} | {peak.pages} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
