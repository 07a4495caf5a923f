"""The arms of the benches on PostgreSQL; each runs alone in its own process.

`python -m bench.postgres_variants NAME COUNT FOLDER DATABASE_URL [PAGES_URL CONCURRENCY]` prints
one line of JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import trio

from bench import ingest_variants, throughput_variants
from bench.ingest_variants import RUN, Ingested, url_of
from bench.local_run import start_run, wait_for_end
from bench.throughput_variants import Measured
from conveyor.bootstrap.runtime import Runtime, create_resources, open_runtime
from conveyor.cli.shutdown import end_if_failed
from conveyor.config import Settings, settings_from
from conveyor.domain import ids, limits
from conveyor.domain.changes import TaskKey
from conveyor.domain.ids import FIRST_BATCH
from conveyor.domain.model import Task, TaskStatus
from conveyor.engines.postgres import sql
from conveyor.engines.postgres.connection import Statement, connect, copy_pieces
from conveyor.engines.postgres.database import DatabaseConfig
from conveyor.engines.postgres.engine import create_tables


def settings_for(database_url: str, folder: Path, concurrency: int = 200) -> Settings:
    settings = settings_from(environ_for(database_url, folder, concurrency))
    return replace(settings, port=0, max_inflight=concurrency)


def environ_for(database_url: str, folder: Path, concurrency: int) -> dict[str, str]:
    return {
        "CONVEYOR_ENGINE": "postgres",
        "CONVEYOR_DATABASE_URL": database_url,
        "CONVEYOR_BLOB_DIR": str(folder / "bodies"),
        "CONVEYOR_DATA_DIR": str(folder / "data"),
        "CONVEYOR_SECRET_KEY": "of the bench, which is no secret",
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
        "CONVEYOR_CONCURRENCY": str(concurrency),
    }


async def bare_copy(count: int, database_url: str) -> Ingested:
    """Creates ids and copies tasks into a table with the indexes of the real one, with one COPY: no
    messages, counters or fences."""
    await create_tables(DatabaseConfig(url=database_url))
    connection = await connect(database_url, options="", prepares=False, password=None)
    await connection.run([Statement("CREATE TABLE tasks_bare (LIKE tasks INCLUDING ALL)")])
    table = sql.TABLES[TaskKey]
    cpu, wall = ingest_variants.cpu_s(), time.perf_counter()
    rows = map(table.to_row, _tasks(count, time.time()))
    await connection.copy(f"tasks_bare ({sql.columns_sql(table)})", copy_pieces(rows))
    seconds = time.perf_counter() - wall
    cpu = ingest_variants.cpu_s() - cpu
    await connection.run([Statement("DROP TABLE tasks_bare")])
    connection.close()
    return Ingested(count, 0, 0, seconds, cpu, ingest_variants.rss_mb())


def _tasks(count: int, now: float) -> Iterator[Task]:
    for start in range(0, count, limits.CHUNK_TASKS):
        numbers = range(start, min(start + limits.CHUNK_TASKS, count))
        names = ids.task_ids(RUN, FIRST_BATCH, numbers)
        shards = ids.shards_of(names, limits.TASK_SHARD_COUNT)
        for name, shard, number in zip(names, shards, numbers, strict=True):
            yield Task(
                run_id=RUN,
                task_id=name,
                shard=shard,
                batch_id=FIRST_BATCH,
                index=number,
                url=url_of(number),
                status=TaskStatus.PENDING,
                created_at=now,
                updated_at=now,
            )


async def ingest(count: int, folder: Path, database_url: str) -> Ingested:
    """Accepts the list over HTTP and ingests it as the ingest streamer does: validates, stages,
    writes under a fence, counts."""
    settings = settings_for(database_url, folder)
    await create_resources(settings)
    return await ingest_variants.ingest_over_http(settings, count)


async def drain(
    count: int, folder: Path, database_url: str, pages_url: str, concurrency: int, processes: int
) -> Measured:
    """Runs Conveyor from submit to completion; `processes` workers share the concurrency."""
    settings = settings_for(database_url, folder, -(-concurrency // processes))
    await create_resources(settings)
    urls = [f"{pages_url}/{number}" for number in range(count)]
    cpu, wall = throughput_variants.cpu_s(), time.perf_counter()
    async with open_runtime(settings, role="bench") as world, running_worker(world):
        more = [_another_worker(settings, folder) for _ in range(processes - 1)]
        try:
            run = await start_run(world.env, urls, concurrency=concurrency, attempts=3)
            totals = await wait_for_end(world.env, run)
        finally:
            for process in more:
                process.terminate()
            for process in more:
                await trio.to_thread.run_sync(process.wait)
    assert totals.successful == count
    seconds = time.perf_counter() - wall
    used = throughput_variants.cpu_s() - cpu
    return Measured(count, seconds, used, throughput_variants.rss_mb())


@asynccontextmanager
async def running_worker(world: Runtime) -> AsyncGenerator[None, None]:
    async with trio.open_nursery() as nursery:
        supervisor = world.worker()
        await nursery.start(supervisor.run)
        nursery.start_soon(end_if_failed, supervisor)
        yield
        nursery.cancel_scope.cancel()


def _another_worker(settings: Settings, folder: Path) -> subprocess.Popen[bytes]:
    database_url = settings.postgres.database_url
    own = environ_for(database_url, folder, settings.concurrency)
    command = [sys.executable, "-P", "-m", "conveyor.cli.main", "worker"]
    return subprocess.Popen(command, env={**os.environ, **own, "CONVEYOR_DRAIN_S": "0"})


def run_arm(name: str, *arguments: str) -> bytes:
    command = [sys.executable, "-m", "bench.postgres_variants", name, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return done.stdout.splitlines()[-1]


def _main(name: str, count: int, folder: Path, database_url: str, *rest: str) -> msgspec.Struct:
    if name == "bare":
        return trio.run(bare_copy, count, database_url)
    if name == "ingest":
        return trio.run(ingest, count, folder, database_url)
    pages_url, concurrency = rest
    processes = 2 if name == "drain-2" else 1
    return trio.run(drain, count, folder, database_url, pages_url, int(concurrency), processes)


if __name__ == "__main__":
    arm, tasks, place, *others = sys.argv[1:]
    result = _main(arm, int(tasks), Path(place), *others)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
