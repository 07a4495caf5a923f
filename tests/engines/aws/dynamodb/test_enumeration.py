"""Enumeration: reading all tasks of a large run reads little more than it returns."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from conveyor.domain.changes import Change, Insert, TaskKey
from conveyor.domain.ids import FIRST_BATCH, TaskId, shards_of, task_ids
from conveyor.domain.model import Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.memory import MemoryQueue
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fault_source import FaultSource
from tests.aws import a_table, an_aws_client
from tests.builders import JOB, RUN, ManualClock, a_task

SHARDS = 16
ROWS = 3_000


def spread(count: int) -> list[Task]:
    identities = task_ids(RUN, FIRST_BATCH, range(count))
    shards = shards_of(identities, SHARDS)
    row = a_task(1)
    return [
        msgspec.structs.replace(row, task_id=identity, shard=shard, index=index)
        for index, (identity, shard) in enumerate(zip(identities, shards, strict=True))
    ]


async def a_large_run(*, rare: Sequence[int] = ()) -> tuple[Table, DynamoStore, list[Task]]:
    """A run whose tasks are all pending, except for a few failed ones."""
    clock = ManualClock()
    client = an_aws_client(AwsModel(clock=clock, fault_source=FaultSource(random=Random(1))))
    table = await a_table(client, "conveyor")
    store = DynamoStore(table, MemoryQueue(clock=clock, random=Random(1)))
    rows = spread(ROWS)
    for index in rare:
        rows[index] = msgspec.structs.replace(rows[index], status=TaskStatus.FAILED)
    for row in rows:
        key = TaskKey(JOB, RUN, row.task_id, row.shard)
        await store.commit([Change((Insert(key, row),))])
    table.meter.rows_read = table.meter.rows_returned = 0
    return table, store, rows


@pytest.mark.parametrize(("limit", "most"), [(1_000, 1.05), (101, 1.2), (50, 1.35), (20, 1.8)])
async def test_enumerating_sixteen_shards_reads_one_row_of_each_more_than_it_returns(
    limit: int, most: float
) -> None:
    table, store, rows = await a_large_run()

    seen: list[TaskId] = []
    while len(seen) < ROWS:
        after = seen[-1] if seen else None
        query = TasksOf(job_id=JOB, run_id=RUN, shard_count=SHARDS, after=after, limit=limit)
        seen += [task.task_id for task in await store.find(query)]

    assert seen == sorted(row.task_id for row in rows)
    assert table.meter.rows_returned == ROWS
    assert table.meter.rows_read <= most * ROWS


async def test_no_page_reads_more_rows_than_allowed_however_rare_the_matches_are() -> None:
    table, store, rows = await a_large_run(rare=[7, 2_900])
    failed = frozenset({TaskStatus.FAILED})

    seen: list[TaskId] = []
    read: list[int] = []
    after: TaskId | None = None
    while not read or after is not None:
        query = TasksOf(
            job_id=JOB, run_id=RUN, shard_count=SHARDS, statuses=failed, after=after, limit=100
        )
        before = table.meter.rows_read
        page = await store.page_tasks(query, read_max=400)
        read.append(table.meter.rows_read - before)
        seen += [task.task_id for task in page.tasks]
        after = page.until

    assert seen == sorted(rows[index].task_id for index in (7, 2_900))
    assert max(read) <= 400
    assert sum(read) <= 1.5 * ROWS
