"""The cost of a task on DynamoDB, and ingest steps that are interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from conveyor.domain import limits
from conveyor.domain.changes import Applied, BatchKey, Chunk, JobKey, RunKey, Stale
from conveyor.domain.ids import FIRST_BATCH, shard_of
from conveyor.domain.model import Batch, Result, Task, Totals
from conveyor.domain.queries import StatsOf, TasksOf
from conveyor.domain.run import settlement
from conveyor.domain.run.series import take_sample
from conveyor.domain.run.settlement import Claimed, Cost, Settled
from conveyor.engines.aws.client.client import Answer, AwsClient, Params
from conveyor.engines.aws.dynamodb import DynamoStore, create_table
from conveyor.engines.aws.dynamodb.keys import item_key
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.memory import MemoryQueue
from conveyor.ports.errors import Unavailable
from tests.builders import (
    JOB,
    RUN,
    T0,
    ManualClock,
    a_batch,
    a_job,
    a_run,
    a_stats,
    a_task,
    keep,
    key_of,
    ref_to,
)

SHARDS = 4


class InterruptedClient:
    """A client that fails from its n-th call on, before or after that call is made."""

    def __init__(self, client: AwsClient, *, at: int, side: str) -> None:
        self._client = client
        self._left = at
        self._side = side

    async def call(
        self, service: str, operation: str, params: Params, *, attempts_max: int = 5
    ) -> Answer:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and self._side == "before"):
            raise Unavailable("the process is gone")
        answer = await self._client.call(service, operation, params, attempts_max=attempts_max)
        if self._left == 0:
            raise Unavailable("the process is gone")
        return answer

    def open(
        self, service: str, operation: str, params: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[Answer]:
        return self._client.open(service, operation, params)


def tasks_in_shards(count: int) -> list[Task]:
    tasks = [a_task(number) for number in range(count)]
    return [msgspec.structs.replace(t, shard=shard_of(t.task_id, SHARDS)) for t in tasks]


def a_chunk(tasks: list[Task], *, done_before: int = 0) -> Chunk:
    shards = sorted({task.shard for task in tasks})
    return Chunk(
        key=BatchKey(JOB, RUN, FIRST_BATCH),
        epoch=1,
        done_before=done_before,
        tasks=tuple(tasks),
        refs=tuple(ref_to(task) for task in tasks),
        stats={shard: {"admitted": sum(t.shard == shard for t in tasks)} for shard in shards},
        values={"done": done_before + len(tasks), "updated_at": T0 + 1},
        gate_in=frozenset({a_stats().status.value}),
    )


async def read_batch(store: DynamoStore) -> Batch:
    batch = await store.read(BatchKey(JOB, RUN, FIRST_BATCH))
    assert batch is not None
    return batch


def a_queue() -> MemoryQueue:
    return MemoryQueue(ManualClock(), Random(1))


async def a_run_in(table: Table, queue: MemoryQueue) -> DynamoStore:
    store = DynamoStore(table, queue)
    stats = [a_stats(shard) for shard in range(SHARDS)]
    run = a_run(shard_count=SHARDS)
    await keep(store, a_job(shard_count=SHARDS), run, a_batch(epoch=1), *stats)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(1, 9))
async def test_a_chunk_interrupted_at_any_call_is_finished_by_repeating_it(
    table: Table, at: int, side: str
) -> None:
    queue = a_queue()
    store = await a_run_in(table, queue)
    tasks = tasks_in_shards(3)
    cut_off = replace(table, client=InterruptedClient(table.client, at=at, side=side))

    try:
        await DynamoStore(cut_off, queue).put_chunk(a_chunk(tasks))
    except Unavailable:
        again = await store.put_chunk(a_chunk(tasks))
        assert isinstance(again, Applied | Stale)

    stats = await store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=SHARDS))
    batch = await store.read(key_of(a_batch()))
    assert [await store.read(key_of(task)) for task in tasks] == tasks
    assert sum(row.admitted for row in stats) == 3
    assert batch is not None
    assert batch.done == 3
    assert (await queue.depth(RUN)).visible in {3, 6}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3), (2, 3)])
async def test_a_chunk_interrupted_at_any_call_is_finished_by_chunks_of_another_length(
    table: Table, first: int, second: int, at: int, side: str
) -> None:
    queue = a_queue()
    store = await a_run_in(table, queue)
    tasks = tasks_in_shards(3)
    cut_off = replace(table, client=InterruptedClient(table.client, at=at, side=side))

    with suppress(Unavailable):
        await DynamoStore(cut_off, queue).put_chunk(a_chunk(tasks[:first]))
    while (done := (await read_batch(store)).done) < len(tasks):
        await store.put_chunk(a_chunk(tasks[done : done + second], done_before=done))

    stats = await store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=SHARDS))
    assert [await store.read(key_of(task)) for task in tasks] == tasks
    assert sum(row.admitted for row in stats) == len(tasks)


@pytest.mark.slow
async def test_a_task_costs_little_more_than_four_write_units(table: Table) -> None:
    store = await a_run_in(table, a_queue())
    tasks = sorted(tasks_in_shards(240), key=lambda task: task.shard)
    refs = [ref_to(task) for task in tasks]
    calls, units = sum(table.meter.calls.values()), table.meter.write_units

    await store.put_chunk(a_chunk(tasks))
    claims = [
        settlement.claim_result(verdict, now=T0)
        for verdict in await store.commit([settlement.claim(ref, now=T0) for ref in refs])
    ]
    result = Result("jobs/1/runs/1/task.1", 20_000, "0" * 64, "text/html", 200)
    settles = [
        settlement.succeed(ref, claim.task, result, spent=Cost(1, 280), now=T0 + 1)
        for ref, claim in zip(refs, claims, strict=True)
        if isinstance(claim, Claimed)
    ]
    verdicts = await store.commit(settles)

    assert len(settles) == len(tasks)
    assert all(
        isinstance(settlement.settle_result(v, t), Settled)
        for v, t in zip(verdicts, tasks, strict=True)
    )
    assert (sum(table.meter.calls.values()) - calls) / len(tasks) < 2.1
    assert (table.meter.write_units - units) / len(tasks) < 4.2


async def test_a_sample_costs_one_call(table: Table) -> None:
    """There is at most one sample per AWS_SAMPLE_TASKS tasks, so at most 0.01 calls per task."""
    store = await a_run_in(table, a_queue())
    run = await store.read(RunKey(JOB, RUN))
    assert run is not None
    totals = Totals(done=limits.AWS_SAMPLE_TASKS, successful=limits.AWS_SAMPLE_TASKS)
    change = take_sample(run, totals, now=T0 + 60, tasks_min=limits.AWS_SAMPLE_TASKS)
    assert change is not None
    calls = sum(table.meter.calls.values())

    (verdict,) = await store.commit([change])

    assert isinstance(verdict, Applied)
    assert sum(table.meter.calls.values()) - calls == 1


@pytest.mark.slow
async def test_pages_of_a_sharded_run_read_little_more_than_they_return(table: Table) -> None:
    store = await a_run_in(table, a_queue())
    tasks = tasks_in_shards(400)
    await store.put_chunk(a_chunk(tasks))
    table.meter.rows_read = table.meter.rows_returned = 0

    seen: list[Task] = []
    while True:
        after = seen[-1].task_id if seen else None
        query = TasksOf(job_id=JOB, run_id=RUN, shard_count=SHARDS, after=after, limit=100)
        page = await store.find(query)
        if not page:
            break
        seen += page

    assert seen == sorted(tasks, key=lambda task: task.task_id)
    assert table.meter.rows_returned == 400
    assert table.meter.rows_read <= 1.2 * 400


async def test_creating_an_existing_table_changes_nothing(table: Table) -> None:
    store = DynamoStore(table, a_queue())
    await keep(store, a_job())

    await create_table(table.client, table.name)

    assert await store.read(key_of(a_job())) == a_job()


async def test_a_row_that_is_requested_twice_is_returned_once(table: Table) -> None:
    place = item_key(JobKey(JOB))
    store = DynamoStore(table, MemoryQueue(ManualClock(), Random(1)))
    await keep(store, a_job())

    found = await table.get_items([place, place])
    await table.remove([place, place])

    assert list(found) == [place]
    assert await table.get_items([place]) == {}
