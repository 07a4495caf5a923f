"""Measures how long a submit of 1, 100 and 9,999 tasks takes, compared with bare SQLite.

The bare arm inserts the same rows (tasks and messages) into the same schema in one transaction.
Conveyor's arms check every line, stage a long list, and respond when the job is durable: once
through the use case, once through the API over a real socket.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import trio

from bench.sqlite_baseline import bare_database, insert_run
from conveyor.api.server.server import HttpServer
from conveyor.bootstrap.runtime import Runtime, open_runtime
from conveyor.config import Settings
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases.submit import jobs

SIZES = (1, 100, 9_999)


class Row(msgspec.Struct, frozen=True):
    """Median milliseconds of each arm."""

    tasks: int
    bare_ms: float
    usecase_ms: float
    http_ms: float


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench submit", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        rows = trio.run(_measure, Path(folder), options.repeats)
    print(f"{'tasks':>7}{'bare ms':>10}{'use case':>10}{'':9}{'HTTP':>10}")
    for row in rows:
        print(
            f"{row.tasks:>7,}{row.bare_ms:>10.2f}{row.usecase_ms:>10.2f}"
            f"{row.usecase_ms / row.bare_ms:>8.1f}x{row.http_ms:>10.2f}"
            f"{row.http_ms / row.bare_ms:>8.1f}x"
        )
    if options.json:
        print(msgspec.json.encode(rows).decode())


async def _measure(folder: Path, repeats: int) -> list[Row]:
    settings = Settings(data_dir=folder / "data", port=0)
    urls: list[str] = []
    async with open_runtime(settings, role="bench") as world, trio.open_nursery() as nursery:
        server = HttpServer(
            make_app=lambda ready: world.app(ready=ready),
            host=settings.host,
            port=0,
            on_listening=urls.append,
        )
        await nursery.start(server.run)
        async with httpx.AsyncClient(base_url=urls[0], trust_env=False, timeout=60) as client:
            rows = [await _row(folder, world, client, size, repeats) for size in SIZES]
        nursery.cancel_scope.cancel()
    return rows


async def _row(
    folder: Path, world: Runtime, client: httpx.AsyncClient, size: int, repeats: int
) -> Row:
    repeats = repeats if size < 1_000 else max(3, repeats // 3)
    urls = [f"https://example.com/{number}" for number in range(size)]
    drafts = [TaskDraft(url=url) for url in urls]
    body = msgspec.json.encode({"tasks": [{"url": url} for url in urls]})
    ids = [f"{number:032x}" for number in random.Random(size).sample(range(10**9), size)]

    async def usecase() -> None:
        request = jobs.Submission(drafts=drafts)
        await jobs.submit(world.env, CallerId("bench"), request, job_id=JobId(world.env.new_id()))

    async def http() -> None:
        headers = {"X-API-Key": "bench", "Content-Type": "application/json"}
        answer = await client.post("/v1/jobs", content=body, headers=headers)
        assert answer.status_code == 201, answer.text

    with bare_database(folder / f"bare-{size}.db") as connection:
        runs = iter(range(10**6))

        async def bare() -> None:
            insert_run(connection, f"run-{next(runs)}", ids)

        arms = [await _median_ms(arm, repeats) for arm in (bare, usecase, http)]
    return Row(size, *arms)


async def _median_ms(arm: Callable[[], Awaitable[None]], repeats: int) -> float:
    await arm()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        await arm()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)
