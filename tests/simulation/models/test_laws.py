"""Tests the laws of the ports with all faults on: faults may delay them, but not break them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from random import Random
from typing import TypeVar

import msgspec
import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.changes import Applied, BatchKey, Chunk, Stale
from conveyor.domain.ids import FIRST_BATCH, LeaseId, shard_of
from conveyor.domain.model import Result, Task, TaskRef
from conveyor.domain.queries import StatsOf, TasksOf
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claimed, Cost
from conveyor.engines.aws.engine import AwsEngine
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.blobs import Stored
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import BlobMissing, QueueGone, Unavailable
from conveyor.ports.store import Store
from conveyor.simulation.models.fault_rates import (
    CallFaults,
    CapacityLimits,
    DynamoFaults,
    RedisFaults,
    S3Faults,
    SqsFaults,
)
from tests.builders import (
    JOB,
    RUN,
    T0,
    a_batch,
    a_job,
    a_ref,
    a_run,
    a_stats,
    a_task,
    keep,
    key_of,
    ref_to,
)
from tests.conformance.strategies import stream
from tests.simulation.models.worlds import World

pytestmark = pytest.mark.slow

T = TypeVar("T")

SHARDS = 4
SEEDS = range(int(os.environ.get("LAW_SEEDS", "6")))
CALLS = CallFaults(
    latency_s=(0.001, 0.05),
    refused_rate=0.1,
    lost_rate=0.05,
    slow_rate=0.02,
    stalled_rate=0.01,
    late_rate=0.01,
)
DYNAMODB = DynamoFaults(
    capacity=CapacityLimits(),
    throttled_shard_rate=0.01,
    throttled_shard_s=(1.0, 5.0),
    unprocessed_rate=0.3,
    conflict_rate=0.1,
    conflict_s=0.05,
    in_progress_rate=0.3,
    stale_read_rate=0.5,
    late_index_rate=0.5,
    late_expiry_rate=0.5,
    never_expires_rate=0.2,
    short_page_rate=0.5,
)
SQS = SqsFaults(
    duplicate_rate=0.1,
    undead_rate=0.05,
    reordered_rate=0.5,
    false_empty_rate=0.3,
    lost_receive_rate=0.1,
    stale_receipt_rate=0.5,
    visibility_drift=0.1,
    unseen_rate=1.0,
    ghost_rate=1.0,
    in_flight_max=30,
    partial_batch_rate=0.2,
)
S3 = S3Faults(
    slow_down_rate=0.1,
    slow_rate=0.1,
    slow_s=(1.0, 10.0),
    lost_put_rate=0.1,
    truncated_list_rate=0.5,
    undeleted_rate=0.2,
    left_open_rate=0.5,
    broken_read_rate=0.2,
)
REDIS = RedisFaults(
    down_rate=0.01,
    down_s=(0.0, 10.0),
    killed_rate=0.05,
    slow_rate=0.1,
    slow_s=(0.001, 0.5),
)


@pytest.fixture(params=SEEDS)
async def harsh(request: pytest.FixtureRequest) -> World:
    world = World(seed=request.param)
    await world.set_up()
    return world


async def until_known(do: Callable[[], Awaitable[T]]) -> T:
    """Repeats the call until it is answered."""
    while True:
        try:
            return await do()
        except Unavailable:
            await trio.sleep(1.0)


def tasks_in_shards(count: int) -> list[Task]:
    tasks = [a_task(number) for number in range(count)]
    return [msgspec.structs.replace(t, shard=shard_of(t.task_id, SHARDS)) for t in tasks]


def a_chunk(tasks: list[Task]) -> Chunk:
    shards = sorted({task.shard for task in tasks})
    return Chunk(
        key=BatchKey(JOB, RUN, FIRST_BATCH),
        epoch=1,
        done_before=0,
        tasks=tuple(tasks),
        refs=tuple(map(ref_to, tasks)),
        stats={shard: {"admitted": sum(t.shard == shard for t in tasks)} for shard in shards},
        values={"done": len(tasks), "updated_at": T0 + 1},
        gate_in=frozenset({a_stats().status.value}),
    )


async def a_run_in(world: World) -> AwsEngine:
    engine = await world.engine()
    stats = [a_stats(shard) for shard in range(SHARDS)]
    run = a_run(shard_count=SHARDS)
    await keep(engine.store, a_job(shard_count=SHARDS), run, a_batch(epoch=1), *stats)
    return engine


async def test_a_repeated_ingest_step_has_its_effect_once(
    harsh: World, autojump_clock: MockClock
) -> None:
    engine, tasks = await a_run_in(harsh), tasks_in_shards(40)
    harsh.set_faults(CALLS, DYNAMODB, SQS)

    verdict = await until_known(lambda: engine.store.put_chunk(a_chunk(tasks)))
    harsh.clear_faults()
    await trio.sleep(120)

    assert isinstance(verdict, Applied | Stale)
    stats = await engine.store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=SHARDS))
    assert [await engine.store.read(key_of(task)) for task in tasks] == tasks
    assert sum(row.admitted for row in stats) == 40
    received = await drain(engine)
    assert received.keys() == {ref_to(task) for task in tasks}


async def drain(engine: AwsEngine) -> Counter[object]:
    """Receives all refs of the run, and counts them."""
    seen: Counter[object] = Counter()
    quiet = 0
    while quiet < 10:
        try:
            messages = await engine.queue.receive(RUN, count_max=10, visibility_s=30)
            seen.update(message.ref for message in messages)
            await engine.queue.ack(messages)
            quiet = 0 if messages else quiet + 1
        except Unavailable:
            quiet = 0
        await trio.sleep(5.0)
    return seen


async def test_every_ref_that_was_sent_is_received(harsh: World, autojump_clock: MockClock) -> None:
    """Despite losses and duplicates each ref arrives, and the queue is empty at the end."""
    engine = await harsh.engine()
    refs = [a_ref(number) for number in range(60)]
    harsh.set_faults(CALLS, SQS)

    await until_known(lambda: engine.queue.open_run(RUN))
    await until_known(lambda: engine.queue.send(refs))
    seen = await drain(engine)
    harsh.clear_faults()
    await trio.sleep(120)
    seen += await drain(engine)

    assert seen.keys() == set(refs)
    assert (await engine.queue.depth(RUN)).visible == 0


async def claim_and_settle(store: Store, refs: Sequence[TaskRef], now: float) -> None:
    result = Result("jobs/1/runs/1/task.1", 20_000, "0" * 64, "text/html", 200)
    verdicts = await store.commit([settlement.claim(ref, now=now) for ref in refs])
    claims = [settlement.claim_result(verdict, now=now) for verdict in verdicts]
    settles = [
        settlement.succeed(ref, claim.task, result, spent=Cost(1, 280), now=now)
        for ref, claim in zip(refs, claims, strict=True)
        if isinstance(claim, Claimed)
    ]
    await store.commit(settles)


async def test_counters_equal_the_rows(harsh: World, autojump_clock: MockClock) -> None:
    engine, tasks = await a_run_in(harsh), tasks_in_shards(40)
    await engine.store.put_chunk(a_chunk(tasks))
    refs = list(map(ref_to, tasks))
    others = [(await harsh.engine(number)).store for number in (1, 2)]
    harsh.set_faults(CALLS, DYNAMODB)

    async def work(store: Store) -> None:
        for start in [*range(0, 40, 5)] * 3:
            with suppress(Unavailable):
                await claim_and_settle(store, refs[start : start + 5], harsh.clock.now())
            await trio.sleep(30.0)  # Claims of the previous round expire meanwhile.

    async with trio.open_nursery() as nursery:
        for store in others:
            nursery.start_soon(work, store)
    harsh.clear_faults()
    await trio.sleep(200)

    rows = await engine.store.find(TasksOf(job_id=JOB, run_id=RUN, shard_count=SHARDS, limit=100))
    stats = await engine.store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=SHARDS))
    ended = sum(row.result is not None for row in rows)
    assert sum(row.done for row in stats) == sum(row.successful for row in stats) == ended
    assert ended > 0


async def test_short_and_empty_pages_contain_all_tasks(
    harsh: World, autojump_clock: MockClock
) -> None:
    engine, tasks = await a_run_in(harsh), tasks_in_shards(100)
    await engine.store.put_chunk(a_chunk(tasks))
    harsh.set_faults(CALLS, DYNAMODB)

    seen: list[Task] = []
    while True:
        after = seen[-1].task_id if seen else None
        query = TasksOf(job_id=JOB, run_id=RUN, shard_count=SHARDS, after=after, limit=17)
        page = await until_known(lambda: engine.store.find(query))  # noqa: B023 (awaited here)
        if not page:
            break
        seen += page

    assert seen == sorted(tasks, key=lambda task: task.task_id)
    assert harsh.fault_source.fault_counts["dynamodb.empty_page"] > 0


async def test_a_deletion_removes_all_rows_despite_unprocessed_batches(
    harsh: World, autojump_clock: MockClock
) -> None:
    engine, tasks = await a_run_in(harsh), tasks_in_shards(60)
    await engine.store.put_chunk(a_chunk(tasks))
    harsh.set_faults(CALLS, DYNAMODB)

    while await until_known(lambda: engine.store.delete_run_rows(JOB, None, limit=50)):
        pass
    harsh.clear_faults()
    await trio.sleep(120)

    table = harsh.aws.dynamodb.tables["rows"]
    jobs = [partition for name, partition in table.partitions.items() if name.startswith("Job#")]
    rows = [sort for job in jobs for sort in job.rows]
    assert rows == [("Job",)]
    assert harsh.fault_source.fault_counts["dynamodb.unprocessed_items"] > 0


async def test_a_body_is_whole_or_absent(harsh: World, autojump_clock: MockClock) -> None:
    blobs = (await harsh.engine()).blobs
    pieces = [bytes([number]) * 1_000_000 for number in range(18)]
    body = b"".join(pieces)
    harsh.set_faults(CALLS, S3)

    async def read(key: str) -> bytes | None:
        try:
            return b"".join([piece async for piece in blobs.open(key)])
        except BlobMissing:
            return None

    async def put() -> Stored:
        async with aclosing(stream(pieces)) as source:
            return await blobs.put_stream("k/a", source)

    for _ in range(3):
        try:
            await put()
        except Unavailable:
            assert await until_known(lambda: read("k/a")) in {None, body}
    stored = await until_known(put)
    copied = await until_known(lambda: blobs.copy("k/a", "k/b"))
    harsh.clear_faults()
    await trio.sleep(120)

    assert await read("k/a") == await read("k/b") == body
    assert stored.sha256 == copied.sha256
    harsh.set_faults(CALLS, S3)
    await until_known(lambda: blobs.delete_prefix("k"))
    harsh.clear_faults()
    assert [await read("k/a"), await read("k/b")] == [None, None]


@pytest.mark.parametrize("kind", ["dynamodb", "redis"])
async def test_live_leases_never_exceed_the_cap(
    harsh: World, kind: str, autojump_clock: MockClock
) -> None:
    """Redis runs without failovers, because a failover loses leases and so breaks the cap."""
    cap, ttl_s = 5, 30.0
    holders = [await a_coordinator(harsh, kind, number) for number in range(3)]
    held: dict[LeaseId, float] = {}
    harsh.set_faults(CALLS, DYNAMODB, REDIS)

    async def work(coordinator: Coordinator) -> None:
        for _ in range(15):
            asked_at = trio.current_time()
            try:
                taken = await coordinator.acquire(JOB, RUN, count_max=3, cap=cap, ttl_s=ttl_s)
            except Unavailable:
                await trio.sleep(5.0)
                continue
            held.update(dict.fromkeys(taken, asked_at + ttl_s))
            assert sum(until > trio.current_time() for until in held.values()) <= cap
            await trio.sleep(5.0)

    async with trio.open_nursery() as nursery:
        for coordinator in holders:
            nursery.start_soon(work, coordinator)

    assert held


async def a_coordinator(world: World, kind: str, number: int) -> Coordinator:
    if kind == "redis":
        return RedisCoordinator(world.redis.link(), Random(number), space="s")
    return (await world.engine(number)).coordinator


async def test_a_send_to_a_removed_queue_fails_in_the_end(
    harsh: World, autojump_clock: MockClock
) -> None:
    engine = await harsh.engine()
    await engine.queue.open_run(RUN)
    harsh.set_faults(CALLS, SQS)
    await until_known(lambda: engine.queue.close_run(RUN))
    harsh.clear_faults()
    await trio.sleep(61)

    with pytest.raises(QueueGone):
        await engine.queue.send([a_ref()])
