"""Enumeration: reading all of a large run reads little more than it returns."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from conveyor.domain.changes import Change, Insert, TaskKey
from conveyor.domain.ids import FIRST_BATCH, TaskId, task_ids
from conveyor.domain.model import Task
from conveyor.domain.queries import TasksOf
from conveyor.domain.sharding import shards_of
from conveyor.engines.aws.dynamo import DynamoStore
from conveyor.engines.memory import MemoryQueue
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fate import Fate
from tests.aws import a_seam, a_table
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


@pytest.mark.parametrize("limit", [1_000, 101])
async def test_a_full_enumeration_of_sixteen_shards_reads_at_most_a_fifth_more_than_it_returns(
    limit: int,
) -> None:
    clock = ManualClock()
    seam = a_seam(AwsModel(clock=clock, fate=Fate(random=Random(1))))
    table = await a_table(seam, "conveyor")
    store = DynamoStore(table, MemoryQueue(clock=clock, random=Random(1)))
    rows = spread(ROWS)
    for row in rows:
        key = TaskKey(JOB, RUN, row.task_id, row.shard)
        await store.commit([Change((Insert(key, row),))])
    table.meter.rows_read = table.meter.rows_returned = 0

    seen: list[TaskId] = []
    while len(seen) < ROWS:
        page = await store.find(
            TasksOf(
                job_id=JOB,
                run_id=RUN,
                shard_count=SHARDS,
                after=seen[-1] if seen else None,
                limit=limit,
            )
        )
        seen += [task.task_id for task in page]

    assert seen == sorted(row.task_id for row in rows)
    assert table.meter.rows_returned == ROWS
    assert table.meter.rows_read <= 1.2 * ROWS
