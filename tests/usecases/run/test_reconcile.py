"""The sweeper finds each half-done state and finishes it by the ordinary paths."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import RunStatus
from conveyor.domain.run import settlement, termination
from conveyor.domain.run.settlement import Claimed
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Queue
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest, reconcile, runs, tasks
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, ManualClock
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import LATER_FROM, PAGE, check_counters, run_of, submit, with_config, work


async def test_a_completion_that_nobody_looked_for_is_found(env: Context) -> None:
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    claim = (await tasks.claim(env, [message.ref]))[0]
    assert isinstance(claim, Claimed)
    result = await tasks.store_body(env, message.ref, claim, PAGE)
    spent = settlement.Cost()
    await env.commit(
        settlement.succeed(message.ref, claim.task, result, spent=spent, now=env.now())
    )

    repairs = await reconcile.sweep_runs(env)

    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED
    assert (repairs.completed, repairs.stopped, repairs.resent) == (1, 0, 0)


async def test_half_a_stop_is_finished(env: Context) -> None:
    accepted = await submit(env, 2)
    await env.commit(termination.request_stop(accepted.run, reason="half", now=env.now()))

    repairs = await reconcile.sweep_runs(env)

    run = await run_of(env, accepted.run)
    assert (run.status, run.stop_reason) == (RunStatus.STOPPED, "half")
    assert repairs.stopped == 1


async def test_lost_messages_are_sent_again(env: Context) -> None:
    accepted = await submit(env, 120)
    await work(env, accepted.run, count=20)
    await env.queue.close_run(accepted.run.run_id)

    repairs = await reconcile.sweep_runs(env)

    assert repairs.resent == 100
    assert await work(env, accepted.run) == 100
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED
    await check_counters(env, accepted.run)


async def test_lost_messages_are_sent_again_where_few_are_left_among_many(
    env: Context,
) -> None:
    env = with_config(env, rows_read_max=7)
    accepted = await submit(env, 120)
    await work(env, accepted.run, count=117)
    await env.queue.close_run(accepted.run.run_id)

    repairs = await reconcile.sweep_runs(env)

    assert repairs.resent == 3
    assert await work(env, accepted.run) == 3
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


@dataclass(frozen=True, slots=True)
class RemovedAtOnce:
    """Ends the run while its queue is being filled again."""

    inner: Queue

    async def open_run(self, run_id: RunId) -> None:
        await self.inner.open_run(run_id)
        await self.inner.close_run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_run_that_ends_while_its_messages_are_sent_again_is_no_trouble(
    env: Context,
) -> None:
    """Found by the simulator (seed 986): the sweeper crashed, and others had to wait."""
    first, second = await submit(env, 2), await submit(env, 2)
    for accepted in (first, second):
        await env.queue.close_run(accepted.run.run_id)

    repairs = await reconcile.sweep_runs(replace(env, queue=RemovedAtOnce(env.queue)))

    assert repairs.resent == 0


@dataclass(frozen=True, slots=True)
class DeletedMeanwhile:
    """Holds up the caller that opens the queue until its job and the job's rows are deleted."""

    env: Context
    job_id: JobId

    async def open_run(self, run_id: RunId) -> None:
        await jobs.delete(self.env, CALLER, self.job_id)
        await reconcile.delete_due(self.env)
        await self.env.queue.open_run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env.queue, name)


async def test_a_queue_that_is_made_anew_does_not_outlive_its_job(env: Context) -> None:
    """Scrubs find queues by the rows of runs, which are gone by then."""
    accepted = await submit(env, 2)
    await env.queue.close_run(accepted.run.run_id)

    slow = replace(env, queue=DeletedMeanwhile(env, accepted.job.job_id))
    repairs = await reconcile.sweep_runs(slow)

    assert repairs.resent == 0
    with pytest.raises(QueueGone):
        await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=1)


async def test_nothing_is_sent_again_while_a_list_is_on_its_way_in(env: Context) -> None:
    """Where rows are written before they count, they would be settled before they are admitted."""
    accepted = await submit(env, LATER_FROM)
    batch = (await ingest.open_batches_of(env, accepted.job.job_id, accepted.run.run_id))[0]
    cut = with_fault(env, Fault(2, When.BEFORE, only="commit"))
    with pytest.raises(Unavailable):
        await reconcile.finish_batch(cut, batch)
    await env.queue.close_run(accepted.run.run_id)

    during = await reconcile.sweep_runs(env)
    for left in await reconcile.stalled_batches(env, idle_s=0):
        await reconcile.finish_batch(env, left)
    after = await reconcile.sweep_runs(env)

    assert (during.resent, after.resent) == (0, LATER_FROM)


async def test_a_queue_that_is_merely_slow_is_left_alone(env: Context) -> None:
    accepted = await submit(env, 5)
    await env.queue.receive(accepted.run.run_id, count_max=5, visibility_s=60)

    repairs = await reconcile.sweep_runs(env)

    depth = await env.queue.depth(accepted.run.run_id)
    assert repairs.resent == 0
    assert depth.visible + depth.hidden == 5


async def test_a_healthy_run_is_not_touched(env: Context) -> None:
    accepted = await submit(env, 5)
    before = await run_of(env, accepted.run)

    repairs = await reconcile.sweep_runs(env)

    assert await run_of(env, accepted.run) == before
    assert repairs == reconcile.SweepResult()


async def test_every_live_run_is_looked_at_however_many_there_are(
    env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_PAGE", 3)
    accepted = [await submit(env, 1) for _ in range(10)]
    for submitted in accepted:
        await env.commit(termination.request_stop(submitted.run, reason=None, now=env.now()))

    repairs = await reconcile.sweep_runs(env)

    assert repairs.stopped == 10


async def test_a_list_that_nobody_moves_is_taken_up(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, LATER_FROM)
    fresh = await reconcile.stalled_batches(env, idle_s=30)
    clock.advance(31)

    for batch in await reconcile.stalled_batches(env, idle_s=30):
        await reconcile.finish_batch(env, batch)

    run = await run_of(env, accepted.run)
    assert fresh == []
    assert (run.total, run.open_batches) == (LATER_FROM, 0)
    assert await reconcile.stalled_batches(env, idle_s=-1) == []


async def test_a_submit_that_died_before_its_ingest_is_finished(
    env: Context, clock: ManualClock
) -> None:
    fault = Fault(1, When.BEFORE, only="put_chunk")
    with suppress(Unavailable):
        await submit(with_fault(env, fault), 120)
    clock.advance(31)

    (batch,) = await reconcile.stalled_batches(env, idle_s=30)
    await reconcile.finish_batch(env, batch)

    assert await ingest.open_batches_of(env, batch.job_id, batch.run_id) == []


async def test_the_intent_of_a_run_that_is_over_ends(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, LATER_FROM)
    await runs.stop(env, CALLER, accepted.job.job_id)
    clock.advance(31)

    for batch in await reconcile.stalled_batches(env, idle_s=30):
        await reconcile.finish_batch(env, batch)

    assert await reconcile.stalled_batches(env, idle_s=-1) == []
    assert (await run_of(env, accepted.run)).status is RunStatus.STOPPED


@dataclass(frozen=True, slots=True)
class ClosingLog:
    """A queue that remembers which runs' queues were removed."""

    inner: Queue
    closed: list[RunId] = field(default_factory=list)

    async def close_run(self, run_id: RunId) -> None:
        self.closed.append(run_id)
        await self.inner.close_run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_the_queue_of_an_ended_run_is_removed_if_a_crash_left_it(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    await env.queue.open_run(accepted.run.run_id)
    live = await submit(env, 1)
    clock.advance(61)

    await reconcile.close_ended_queues(env)

    with pytest.raises(QueueGone):
        await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=1)
    assert len(await env.queue.receive(live.run.run_id, count_max=1, visibility_s=1)) == 1


async def test_the_queue_of_an_ended_run_is_removed_by_one_sweep_only(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    clock.advance(61)
    log = ClosingLog(env.queue)
    watched = replace(env, queue=log)

    await reconcile.close_ended_queues(watched)
    await reconcile.close_ended_queues(watched)

    assert log.closed == [accepted.run.run_id]


async def test_a_later_sweep_still_closes_what_ended_shortly_before_the_last(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    log = ClosingLog(env.queue)
    watched = replace(env, queue=log)
    clock.advance(30)

    first_at = await reconcile.close_ended_queues(watched)
    clock.advance(600)
    await reconcile.close_ended_queues(watched, last_at=first_at)

    assert log.closed == [accepted.run.run_id]


async def test_sweeping_again_changes_nothing(env: Context) -> None:
    accepted = await submit(env, 3)
    await env.queue.close_run(accepted.run.run_id)
    await reconcile.sweep_runs(env)

    repairs = await reconcile.sweep_runs(env)

    assert repairs == reconcile.SweepResult()
    assert (await env.queue.depth(accepted.run.run_id)).visible == 3
