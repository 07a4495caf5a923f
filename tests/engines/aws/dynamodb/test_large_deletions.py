"""A large deletion: all shards are deleted concurrently, each at its own speed."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from conveyor.simulation.models.fault_rates import CallFaults, CapacityLimits, DynamoFaults
from tests.builders import JOB, a_job, a_run, a_task, keep
from tests.simulation.models.worlds import TABLE, World

ROWS = 2_400
PARTITION_WRITES = 100.0
LIMITS = CapacityLimits(partition_writes=PARTITION_WRITES, table_writes=10_000)


async def delete_a_run(shard_count: int) -> float:
    """Returns the virtual seconds that the deletion of all rows takes."""
    world = World()
    await world.set_up()
    store = (await world.engine()).store
    tasks = [a_task(number, shard=number % shard_count) for number in range(ROWS)]
    await keep(store, a_job(shard_count=shard_count), a_run(shard_count=shard_count), *tasks)
    world.set_faults(CallFaults(latency_s=(0.002, 0.006)), DynamoFaults(capacity=LIMITS))
    began = trio.current_time()

    while await store.delete_run_rows(JOB, None, limit=2_000):
        pass

    rows = world.aws.dynamodb.tables[TABLE].partitions.values()
    assert sum(len(row.rows) for row in rows) == 1, "more than the job is left"
    return trio.current_time() - began


@pytest.mark.parametrize("shard_count", [1, 8])
async def test_rows_are_deleted_about_as_fast_as_all_shards_together_allow(
    shard_count: int, autojump_clock: MockClock
) -> None:
    took_s = await delete_a_run(shard_count)

    assert took_s < 1.5 * ROWS / (shard_count * PARTITION_WRITES)
