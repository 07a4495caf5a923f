"""The laws of Store.put_chunk: an ingest step inserts tasks, counts them once, and is fenced
(docs/storage.md, Rows)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from conveyor.domain.changes import Applied, BatchKey, Chunk, Missing, Row, Stale, TaskKey
from conveyor.domain.ids import FIRST_BATCH
from conveyor.domain.model import BatchStatus, CounterState, Task, TaskStatus
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Queue
from conveyor.ports.store import Store
from tests.builders import (
    JOB,
    RUN,
    T0,
    a_batch,
    a_change,
    a_run,
    a_stats,
    a_task,
    keep,
    key_of,
    ref_to,
    update,
)

OPEN = frozenset({CounterState.OPEN.value})


def a_chunk(*tasks: Task, **fields: Any) -> Chunk:
    """A chunk that inserts these tasks and counts them in their shards."""
    shards = sorted({task.shard for task in tasks})
    done = fields.get("done_before", 0) + len(tasks)
    chunk = Chunk(
        key=BatchKey(JOB, RUN, FIRST_BATCH),
        epoch=1,
        done_before=0,
        tasks=tasks,
        refs=tuple(ref_to(task) for task in tasks),
        stats={shard: {"admitted": sum(t.shard == shard for t in tasks)} for shard in shards},
        values={"done": done, "cursor": f"after-{done}", "updated_at": T0 + done},
        gate_in=OPEN,
    )
    return msgspec.structs.replace(chunk, **fields)


async def _store_rows(store: Store, queue: Queue, *rows: Row) -> None:
    await queue.open_run(RUN)
    await keep(store, a_run(), *rows)


async def test_a_chunk_writes_tasks_references_counters_and_checkpoint(
    store: Store, queue: Queue
) -> None:
    await _store_rows(store, queue, a_batch(epoch=1, total=3), a_stats(0), a_stats(1, credits=4))
    tasks = [a_task(0), a_task(1, shard=1), a_task(2, shard=1)]

    verdict = await store.put_chunk(a_chunk(*tasks))

    batch = a_batch(epoch=1, total=3, done=3, cursor="after-3", updated_at=T0 + 3)
    assert verdict == Applied((batch,))
    assert await store.read(key_of(batch)) == batch
    assert [await store.read(key_of(task)) for task in tasks] == tasks
    assert await store.read(key_of(a_stats(0))) == a_stats(0, admitted=1)
    assert await store.read(key_of(a_stats(1))) == a_stats(1, admitted=2, credits=4)
    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    assert [message.ref for message in messages] == [ref_to(task) for task in tasks]


async def test_a_chunk_may_insert_tasks_that_it_does_not_enqueue(
    store: Store, queue: Queue
) -> None:
    await _store_rows(store, queue, a_batch(epoch=1), a_stats())
    failed, waiting = a_task(0, status=TaskStatus.FAILED), a_task(1)
    counts = {0: {"admitted": 2, "done": 1, "failed": 1, "bad_target": 1}}

    await store.put_chunk(a_chunk(failed, waiting, refs=(ref_to(waiting),), stats=counts))

    assert await store.read(key_of(failed)) == failed
    assert await store.read(key_of(a_stats())) == a_stats(
        admitted=2, done=1, failed=1, bad_target=1
    )
    [message] = await queue.receive(RUN, count_max=10, visibility_s=60)
    assert message.ref == ref_to(waiting)


async def test_an_empty_chunk_moves_the_checkpoint(store: Store, queue: Queue) -> None:
    await _store_rows(store, queue, a_batch(epoch=1))

    verdict = await store.put_chunk(a_chunk(values={"status": BatchStatus.SEALED}))

    assert verdict == Applied((a_batch(epoch=1, status=BatchStatus.SEALED),))


@pytest.mark.parametrize("status", list(TaskStatus))
async def test_an_existing_task_is_not_changed_whatever_its_status(
    store: Store, queue: Queue, status: TaskStatus
) -> None:
    existing = a_task(
        0, status=status, claim=3, claim_until=T0 + 9, attempts=2, url="https://old.example"
    )
    await _store_rows(store, queue, a_batch(epoch=1), a_stats(), existing)

    verdict = await store.put_chunk(a_chunk(a_task(0), a_task(1)))

    assert isinstance(verdict, Applied)
    assert await store.read(key_of(existing)) == existing
    assert await store.read(key_of(a_task(1))) == a_task(1)


FENCED_OUT = {
    "an older epoch": {"epoch": 0},
    "a newer epoch": {"epoch": 2},
    "an earlier step": {"done_before": 4},
    "a later step": {"done_before": 6},
}


@pytest.mark.parametrize("fields", FENCED_OUT.values(), ids=FENCED_OUT.keys())
async def test_a_chunk_of_another_epoch_or_position_is_stale_and_counts_nothing(
    store: Store, queue: Queue, fields: dict[str, int]
) -> None:
    batch = a_batch(epoch=1, done=5)
    await _store_rows(store, queue, batch, a_stats(admitted=5))

    verdict = await store.put_chunk(a_chunk(a_task(5), **{"done_before": 5, **fields}))

    assert verdict == Stale(key_of(batch), batch)
    assert await store.read(key_of(batch)) == batch
    assert await store.read(key_of(a_stats())) == a_stats(admitted=5)


@pytest.mark.parametrize("gate", [CounterState.DRAINING, CounterState.CLOSED])
async def test_a_chunk_is_stale_and_counts_nothing_if_one_counter_state_is_not_accepted(
    store: Store, queue: Queue, gate: CounterState
) -> None:
    shut = a_stats(1, status=gate)
    await _store_rows(store, queue, a_batch(epoch=1), a_stats(0), shut, a_stats(2))
    tasks = [a_task(index, shard=index) for index in range(3)]

    verdict = await store.put_chunk(a_chunk(*tasks))

    assert verdict == Stale(key_of(shut), shut)
    assert await store.read(key_of(a_batch())) == a_batch(epoch=1)
    rows = [await store.read(key_of(row)) for row in (a_stats(0), shut, a_stats(2))]
    assert rows == [a_stats(0), shut, a_stats(2)]


async def test_a_chunk_passes_if_it_accepts_the_counter_state(store: Store, queue: Queue) -> None:
    await _store_rows(store, queue, a_batch(epoch=1), a_stats(status=CounterState.DRAINING))

    verdict = await store.put_chunk(a_chunk(a_task(), gate_in=frozenset({"open", "draining"})))

    assert isinstance(verdict, Applied)


async def test_a_chunk_without_its_batch_is_missing_and_counts_nothing(
    store: Store, queue: Queue
) -> None:
    await _store_rows(store, queue, a_stats())

    verdict = await store.put_chunk(a_chunk(a_task()))

    assert verdict == Missing(key_of(a_batch()))
    assert await store.read(key_of(a_batch())) is None
    assert await store.read(key_of(a_stats())) == a_stats()


async def test_a_chunk_without_a_counters_row_is_missing_even_if_its_epoch_is_stale(
    store: Store, queue: Queue
) -> None:
    await _store_rows(store, queue, a_batch(epoch=7), a_stats(0))

    verdict = await store.put_chunk(a_chunk(a_task(0), a_task(1, shard=1)))

    assert verdict == Missing(key_of(a_stats(1)))
    assert await store.read(key_of(a_batch())) == a_batch(epoch=7)
    assert await store.read(key_of(a_stats(0))) == a_stats(0)
    assert await store.read(key_of(a_stats(1))) is None


async def test_repeating_a_chunk_changes_nothing_more(store: Store, queue: Queue) -> None:
    await _store_rows(store, queue, a_batch(epoch=1), a_stats())
    chunk = a_chunk(a_task(0), a_task(1))
    first = await store.put_chunk(chunk)
    claimed = a_task(0, status=TaskStatus.PROCESSING, claim=1)
    await store.commit([a_change(update(claimed, status=claimed.status, claim=1))])

    second = await store.put_chunk(chunk)

    assert isinstance(first, Applied)
    assert second == Stale(key_of(a_batch()), first.rows[0])
    assert await store.read(key_of(claimed)) == claimed
    assert await store.read(key_of(a_stats())) == a_stats(admitted=2)


async def test_references_of_a_chunk_create_a_missing_queue(store: Store, queue: Queue) -> None:
    await keep(store, a_run(), a_batch(epoch=1), a_stats())

    verdict = await store.put_chunk(a_chunk(a_task()))

    assert isinstance(verdict, Applied)
    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_a_chunk_without_references_creates_no_queue(store: Store, queue: Queue) -> None:
    await keep(store, a_run(), a_batch(epoch=1), a_stats())

    verdict = await store.put_chunk(a_chunk(a_task(status=TaskStatus.FAILED), refs=()))

    assert isinstance(verdict, Applied)
    with pytest.raises(QueueGone):
        await queue.receive(RUN, count_max=1, visibility_s=60)


async def test_concurrent_attempts_at_one_chunk_count_once(store: Store, queue: Queue) -> None:
    await _store_rows(store, queue, a_batch(epoch=1), a_stats())
    chunk = a_chunk(*(a_task(index) for index in range(10)))
    verdicts: list[object] = []

    async def ingest() -> None:
        verdicts.append(await store.put_chunk(chunk))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ingest)

    assert sum(isinstance(verdict, Applied) for verdict in verdicts) == 1
    assert await store.read(key_of(a_stats())) == a_stats(admitted=10)


async def test_tasks_exist_before_their_references_can_be_received(
    store: Store, queue: Queue
) -> None:
    await _store_rows(store, queue, a_batch(epoch=1), a_stats())
    orphans: list[TaskKey] = []

    async def work() -> None:
        received = 0
        while received < 40:
            for message in await queue.receive(RUN, count_max=10, visibility_s=60):
                key = TaskKey(JOB, RUN, message.ref.task_id, message.ref.shard)
                orphans.extend([key] if await store.read(key) is None else [])
                received += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        for done in range(0, 40, 4):
            tasks = [a_task(index) for index in range(done, done + 4)]
            await store.put_chunk(a_chunk(*tasks, done_before=done))

    assert orphans == []


async def test_references_are_sent_before_the_checkpoint_moves(store: Store, queue: Queue) -> None:
    await _store_rows(store, queue, a_batch(epoch=1), a_stats())
    seen: list[tuple[int, int]] = []

    async def watch() -> None:
        done = 0
        while done < 40:
            batch = await store.read(key_of(a_batch()))
            assert batch is not None
            done = batch.done
            seen.append((done, (await queue.depth(RUN)).visible))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        for done in range(0, 40, 4):
            tasks = [a_task(index) for index in range(done, done + 4)]
            await store.put_chunk(a_chunk(*tasks, done_before=done))

    assert all(done <= sent for done, sent in seen)
    assert await queue.depth(RUN) == Depth(visible=40, hidden=0)
