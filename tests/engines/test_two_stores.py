"""The store made of two stores: what a crash between its two writes leaves, and how it is
finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from conveyor.domain.changes import (
    Applied,
    Change,
    CrossingKey,
    Guard,
    Missing,
    Row,
    Stale,
    Verdict,
)
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import CounterState, RunStatus
from conveyor.domain.queries import StatsOf, UnfinishedCrossings, UnplacedEvents
from conveyor.domain.run import termination
from conveyor.domain.submit import admission
from conveyor.engines.memory import MemoryEngine, memory_engine
from conveyor.engines.two_stores import SplitStore
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from tests.builders import (
    JOB,
    RUN,
    T0,
    ManualClock,
    a_batch,
    a_change,
    a_job,
    a_record,
    a_run,
    a_stats,
    a_task,
    add,
    insert,
    keep,
    kept,
    key_of,
    ref_to,
    update,
)
from tests.conformance.test_chunks import a_chunk

ALL_EVENTS = UnplacedEvents(before=T0 + 1e6, limit=10)


@dataclass
class Faulty:
    """A store that fails at the next commit: before it, or after it."""

    store: Any
    fails: list[str] = field(default_factory=list)
    calls: list[Sequence[Change]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        self.calls.append(changes)
        how = self.fails.pop(0) if self.fails else ""
        if how == "before":
            raise Unavailable("nothing was written")
        verdicts: list[Verdict] = await self.store.commit(changes)
        if how == "after":
            raise Unavailable("the answer was lost")
        return verdicts


@dataclass
class Pair:
    records: Faulty
    tasks: Faulty
    engine: MemoryEngine
    store: SplitStore

    async def unfinished(self) -> int:
        return len(await self.records.find(UnfinishedCrossings(limit=10)))


@pytest.fixture
def pair() -> Pair:
    clock, random = ManualClock(), Random(1)
    engine, other = (memory_engine(clock=clock, random=random) for _ in range(2))
    records, tasks = Faulty(engine.store), Faulty(other.store)
    tokens = iter(range(1000))
    store = SplitStore(
        records, tasks, engine.queue, now=clock.now, new_token=lambda: str(next(tokens))
    )
    return Pair(records, tasks, engine, store)


async def _commit(store: SplitStore, change: Change) -> Verdict:
    (verdict,) = await store.commit([change])
    return verdict


def _creation() -> Change:
    job = a_job(active_run_id=RUN, latest_run_id=RUN)
    return admission.new_job(job, a_run(open_batches=1), a_batch(epoch=1), [])


async def _is_half_written(pair: Pair, change: Change) -> None:
    pair.tasks.fails = ["before"]
    with pytest.raises(Unavailable):
        await _commit(pair.store, change)
    assert await pair.unfinished() == 1


async def test_a_change_whose_first_write_failed_leaves_nothing(pair: Pair) -> None:
    pair.records.fails = ["before"]

    with pytest.raises(Unavailable):
        await _commit(pair.store, _creation())

    assert await pair.unfinished() == 0
    assert await pair.store.find(ALL_EVENTS) == []
    assert await kept(pair.store, a_stats()) is None


async def test_a_finished_change_leaves_no_crossing(pair: Pair) -> None:
    verdict = await _commit(pair.store, _creation())

    assert isinstance(verdict, Applied)
    assert [type(row).__name__ for row in verdict.rows] == [
        "Job", "Run", "ShardCounters", "Batch", "Event", "Event",
    ]  # fmt: skip
    assert await pair.unfinished() == 0
    assert len(await pair.store.find(ALL_EVENTS)) == 2


async def test_a_half_written_change_is_finished_by_a_sweep(pair: Pair) -> None:
    await _is_half_written(pair, _creation())

    count = await pair.store.finish_unfinished()

    assert count == 1
    assert await pair.unfinished() == 0
    assert len(await pair.store.find(ALL_EVENTS)) == 2
    assert await kept(pair.store, a_stats()) == a_stats()


async def test_a_second_part_with_a_lost_answer_is_written_once(pair: Pair) -> None:
    await keep(pair.store, a_job(), a_stats())
    pair.tasks.fails = ["after"]

    with pytest.raises(Unavailable):
        await _commit(pair.store, a_change(update(a_job(), name="x"), add(a_stats(), admitted=1)))
    await pair.store.finish_unfinished()

    assert await kept(pair.store, a_stats()) == a_stats(admitted=1)
    assert await pair.unfinished() == 0


async def test_a_change_is_applied_although_its_crossing_cannot_be_deleted(pair: Pair) -> None:
    pair.records.fails = ["", "before"]

    verdict = await _commit(pair.store, _creation())
    await pair.store.finish_unfinished()

    assert isinstance(verdict, Applied)
    assert await pair.unfinished() == 0
    assert len(await pair.store.find(ALL_EVENTS)) == 2


async def test_the_next_change_of_a_job_finishes_the_previous_one(pair: Pair) -> None:
    await _is_half_written(pair, _creation())

    verdict = await _commit(pair.store, termination.request_stop(a_run(), reason=None, now=T0))

    assert isinstance(verdict, Applied)
    assert await kept(pair.store, a_stats()) == a_stats(status=CounterState.DRAINING)
    assert await pair.unfinished() == 0


async def test_reading_a_stopping_run_finishes_the_change_of_its_counters(pair: Pair) -> None:
    await _commit(pair.store, _creation())
    await _is_half_written(pair, termination.request_stop(a_run(), reason=None, now=T0))
    assert await kept(pair.store, a_stats()) == a_stats()

    run = await pair.store.read(key_of(a_run()))

    assert run is not None
    assert run.stop_requested_at == T0
    assert await kept(pair.store, a_stats()) == a_stats(status=CounterState.DRAINING)


async def test_a_chunk_of_a_new_run_finishes_the_creation_of_the_run(pair: Pair) -> None:
    await _is_half_written(pair, _creation())

    verdict = await pair.store.put_chunk(a_chunk(a_task(0), a_task(1)))

    assert isinstance(verdict, Applied)
    assert await kept(pair.store, a_stats()) == a_stats(admitted=2)


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_repeated_chunk_of_any_length_counts_its_tasks_once(pair: Pair, how: str) -> None:
    await _commit(pair.store, _creation())
    pair.records.fails = [how]
    with pytest.raises(Unavailable):
        await pair.store.put_chunk(a_chunk(a_task(0), a_task(1)))

    verdicts = [
        await pair.store.put_chunk(a_chunk(a_task(0), a_task(1), a_task(2))),
        await pair.store.put_chunk(a_chunk(a_task(2), done_before=2)),
    ]

    assert sum(isinstance(verdict, Applied) for verdict in verdicts) == 1
    assert await kept(pair.store, a_stats()) == a_stats(admitted=3)


async def test_references_are_sent_after_their_rows_and_before_the_checkpoint(pair: Pair) -> None:
    await _commit(pair.store, _creation())
    pair.records.fails = ["before"]

    with pytest.raises(Unavailable):
        await pair.store.put_chunk(a_chunk(a_task(0)))

    (message,) = await pair.engine.queue.receive(RUN, count_max=5, visibility_s=1)
    assert message.ref == ref_to(a_task(0))
    assert await kept(pair.store, a_task(0)) == a_task(0)


async def test_a_deletion_first_finishes_changes_that_would_write_rows_later(pair: Pair) -> None:
    await _is_half_written(pair, _creation())

    while await pair.store.delete_run_rows(JOB, None, limit=10):
        pass
    await pair.store.finish_unfinished()

    assert await pair.store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=1)) == []
    assert await pair.store.find(ALL_EVENTS) == []


async def test_finishing_a_change_writes_no_rows_that_were_deleted_meanwhile(pair: Pair) -> None:
    await _commit(pair.store, _creation())
    await _is_half_written(pair, termination.request_stop(a_run(), reason=None, now=T0))
    while await pair.tasks.delete_run_rows(JOB, RUN, limit=10):
        pass

    await pair.store.finish_unfinished()

    assert await pair.unfinished() == 0
    assert await kept(pair.store, a_stats()) is None


async def test_a_missing_row_of_either_store_outranks_a_stale_one(pair: Pair) -> None:
    await keep(pair.store, a_job(), a_task())
    stale_job = update(a_job(), Guard(status_in=frozenset({"closed"})), name="x")

    verdict = await _commit(pair.store, a_change(stale_job, add(a_stats(), done=1)))

    assert verdict == Missing(key_of(a_stats()))


async def test_a_change_is_refused_by_the_guards_of_its_first_store(pair: Pair) -> None:
    await keep(pair.store, a_run(status=RunStatus.STOPPED), a_stats())
    stop = a_change(
        update(a_run(), Guard(status_in=RUN_LIVE), updated_at=T0), add(a_stats(), retrying=1)
    )

    verdict = await _commit(pair.store, stop)

    assert verdict == Stale(key_of(a_run()), a_run(status=RunStatus.STOPPED))
    assert await kept(pair.store, a_stats()) == a_stats()
    assert await pair.store.read(CrossingKey(JOB)) is None


async def test_the_settles_of_a_call_are_one_commit_of_the_task_store(pair: Pair) -> None:
    await keep(pair.store, a_stats(), a_task(0), a_task(1))
    pair.tasks.calls.clear()

    await pair.store.commit([a_change(update(a_task(n), claim=1)) for n in range(2)])

    assert [len(changes) for changes in pair.tasks.calls] == [2]


async def test_verdicts_before_a_failure_are_known_and_later_changes_wrote_nothing(
    pair: Pair,
) -> None:
    rows: list[Row] = [a_record("a"), a_task(0), a_record("b")]
    pair.tasks.fails = ["before"]

    with pytest.raises(PartlyUnavailable) as caught:
        await pair.store.commit([a_change(insert(row)) for row in rows])

    assert caught.value.verdicts == [Applied((a_record("a"),)), None, None]
    assert caught.value.turned_away == {2}
    assert await kept(pair.store, a_record("b")) is None
