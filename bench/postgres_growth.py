"""Measures whether tables, dead rows and WAL of PostgreSQL stop growing during a long run.

The bench starts one server with durable commits and autovacuum's defaults, and one worker whose
gateway returns the same short page immediately, so that the database does most of the work. The
list is ingested first. The bench takes a sample then, and when a tenth, half and all of the tasks
have ended. WAL is per task since the previous sample. An update is `in place` if it writes no
index. `others` are all tables except those of tasks and messages.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import trio

from bench.local_run import start_run
from bench.postgres_variants import running_worker, settings_for
from conveyor.bootstrap.runtime import Runtime, create_resources, open_runtime
from conveyor.domain.budget import Price
from conveyor.domain.changes import RunKey
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Run
from conveyor.ports.gateway import Scraped, ScrapeRequest
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import ingest, reconcile
from tests.postgres import execute
from tests.servers import DURABLE, a_postgres

SHARES = (0.1, 0.5, 1.0)
POLL_S = 0.2
# A PostgreSQL backend reports its dead rows at most once a second.
REPORTED_S = 1.5
CONCURRENCY = 200
MB = 1024 * 1024
# PostgreSQL's default. The servers of tests run autovacuum more often.
AUTOVACUUM = "autovacuum_naptime=1min"

_SIZES = """
SELECT CASE WHEN relname ~ '^tasks(_|$)' THEN 'tasks' WHEN relname = 'messages' THEN relname
            ELSE 'others' END,
       sum(pg_table_size(relid))::float8, sum(pg_indexes_size(relid))::float8,
       sum(n_dead_tup)::bigint, sum(n_tup_upd)::bigint, sum(n_tup_hot_upd)::bigint
FROM pg_stat_user_tables GROUP BY 1
"""
_WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"


class TableSize(msgspec.Struct, frozen=True):
    table_mb: float
    indexes_mb: float
    dead_rows: int
    updates: int
    updates_in_place: int


class Sample(msgspec.Struct, frozen=True):
    done: int
    at: float
    wal_bytes: float
    tables: Mapping[str, TableSize]


class SamePage:
    """A gateway that returns the same page for every request, without waiting."""

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Scraped:
        await trio.lowlevel.checkpoint()
        return Scraped(status=200, content_type="text/plain", body=b"page")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench postgres_growth", description=__doc__)
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with (
        a_postgres((*DURABLE, AUTOVACUUM)) as server,
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder,
    ):
        samples = trio.run(drain, options.tasks, Path(folder), server.url)
    show(samples)
    if options.json:
        print(msgspec.json.encode(json_line(samples)).decode())


async def drain(count: int, folder: Path, database_url: str) -> list[Sample]:
    settings = settings_for(database_url, folder, CONCURRENCY)
    await create_resources(settings)
    urls = [f"https://example.com/catalogue/page-{number}" for number in range(count)]
    async with open_runtime(settings, role="bench") as opened:
        world = replace(opened, gateway=SamePage())
        samples = [await take_sample(database_url, 0)]
        run = await start_run(world.env, urls, concurrency=CONCURRENCY, attempts=3)
        for batch in await ingest.open_batches_of(world.env, run.job_id, run.run_id):
            await reconcile.finish_batch(world.env, batch)
        samples.append(await take_sample(database_url, 0))
        async with running_worker(world):
            for share in SHARES:
                done = await wait_until_done(world, run, round(share * count))
                samples.append(await take_sample(database_url, done))
    return samples


async def wait_until_done(world: Runtime, run: Run, count: int) -> int:
    while True:
        current = await world.env.store.read(RunKey(run.job_id, run.run_id))
        assert current is not None
        totals = await totals_of(world.env, current)
        has_ended = current.status not in RUN_LIVE
        assert not has_ended or totals.successful == current.total, "a task was lost or failed"
        if totals.done >= count and (has_ended or count < current.total):
            return totals.done
        await trio.sleep(POLL_S)


async def take_sample(database_url: str, done: int) -> Sample:
    at = time.monotonic()
    ((wal_bytes,),) = await _select(database_url, _WAL)
    await trio.sleep(REPORTED_S)
    tables = {
        name: TableSize(table / MB, indexes / MB, *counts)
        for name, table, indexes, *counts in await _select(database_url, _SIZES)
    }
    return Sample(done, at, wal_bytes, tables)


async def _select(database_url: str, sql: str) -> Sequence[Any]:
    return await execute(database_url, sql)


def show(samples: Sequence[Sample]) -> None:
    print(
        f"{'':29}{'tasks MB':>22}{'messages MB':>22}{'others':>8}{'dead rows':>22}\n"
        f"{'done':>9}{'tasks/s':>9}{'WAL B/task':>11}"
        f"{'table':>8}{'indexes':>8}{'in place':>9}{'table':>9}{'indexes':>9}{'MB':>8}"
        f"{'tasks':>12}{'messages':>10}"
    )
    for before, sample in pairwise(samples):
        tasks, messages, others = (sample.tables[name] for name in ("tasks", "messages", "others"))
        tasks_count = ended_between(before, sample, samples)
        print(
            f"{sample.done:>9,}{tasks_count / (sample.at - before.at):>9,.0f}"
            f"{wal_per_task(before, sample, samples):>11,.0f}"
            f"{tasks.table_mb:>8,.0f}{tasks.indexes_mb:>8,.0f}"
            f"{tasks.updates_in_place / max(1, tasks.updates):>9.1%}"
            f"{messages.table_mb:>9,.1f}{messages.indexes_mb:>9,.1f}"
            f"{others.table_mb + others.indexes_mb:>8,.1f}"
            f"{tasks.dead_rows:>12,}{messages.dead_rows:>10,}"
        )


def ended_between(before: Sample, sample: Sample, samples: Sequence[Sample]) -> int:
    """Returns how many tasks ended between two samples. The first interval is the ingest: it
    returns the number of ingested tasks."""
    return sample.done - before.done or samples[-1].done


def wal_per_task(before: Sample, sample: Sample, samples: Sequence[Sample]) -> float:
    return (sample.wal_bytes - before.wal_bytes) / ended_between(before, sample, samples)


def json_line(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the figures of the JSON line. WAL of the last tasks is compared with the first tenth,
    and the size of the tasks table with its size after the ingest: a ratio of 1 is no growth."""

    def grown(sample: Sample) -> TableSize:
        return sample.tables["tasks"]

    ingested, last = samples[1], samples[-1]
    wal = [wal_per_task(before, sample, samples) for before, sample in pairwise(samples)]
    return {
        "tasks": last.done,
        "wal_ratio": round(wal[-1] / wal[1], 3),
        "table_ratio": round(grown(last).table_mb / grown(ingested).table_mb, 3),
        "indexes_ratio": round(grown(last).indexes_mb / grown(ingested).indexes_mb, 3),
        "dead_messages_max": max(sample.tables["messages"].dead_rows for sample in samples),
    }
