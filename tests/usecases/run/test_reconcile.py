"""The sweep finds half-done states and finishes them with the ordinary use cases."""

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


async def test_a_run_whose_tasks_are_all_done_is_completed_by_a_sweep(env: Context) -> None:
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


async def test_an_interrupted_stop_is_finished_by_a_sweep(env: Context) -> None:
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


async def test_lost_messages_are_sent_again_for_the_few_unfinished_tasks_of_many(
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
class QueueRemovedOnOpen:
    """Removes the queue as soon as it is opened, as the end of the run would."""

    inner: Queue

    async def open_run(self, run_id: RunId) -> None:
        await self.inner.open_run(run_id)
        await self.inner.close_run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_run_that_ends_while_its_messages_are_sent_again_causes_no_error(
    env: Context,
) -> None:
    """Found by the simulator (seed 986): the sweeper crashed and other runs had to wait."""
    first, second = await submit(env, 2), await submit(env, 2)
    for accepted in (first, second):
        await env.queue.close_run(accepted.run.run_id)

    repairs = await reconcile.sweep_runs(replace(env, queue=QueueRemovedOnOpen(env.queue)))

    assert repairs.resent == 0


@dataclass(frozen=True, slots=True)
class JobDeletedBeforeOpen:
    """Deletes the job and its rows before the queue is opened."""

    env: Context
    job_id: JobId

    async def open_run(self, run_id: RunId) -> None:
        await jobs.delete(self.env, CALLER, self.job_id)
        await reconcile.delete_due(self.env)
        await self.env.queue.open_run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env.queue, name)


async def test_a_queue_that_a_sweep_creates_does_not_outlive_its_deleted_job(env: Context) -> None:
    """Deletion finds queues by the rows of runs, which are already gone here."""
    accepted = await submit(env, 2)
    await env.queue.close_run(accepted.run.run_id)

    slow = replace(env, queue=JobDeletedBeforeOpen(env, accepted.job.job_id))
    repairs = await reconcile.sweep_runs(slow)

    assert repairs.resent == 0
    with pytest.raises(QueueGone):
        await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=1)


async def test_nothing_is_sent_again_while_a_list_is_being_ingested(env: Context) -> None:
    """Some engines insert rows before they are counted; sent again, such tasks would be settled
    before they are admitted."""
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


async def test_messages_in_flight_are_not_sent_again(env: Context) -> None:
    accepted = await submit(env, 5)
    await env.queue.receive(accepted.run.run_id, count_max=5, visibility_s=60)

    repairs = await reconcile.sweep_runs(env)

    depth = await env.queue.depth(accepted.run.run_id)
    assert repairs.resent == 0
    assert depth.visible + depth.hidden == 5


async def test_a_sweep_does_not_change_a_healthy_run(env: Context) -> None:
    accepted = await submit(env, 5)
    before = await run_of(env, accepted.run)

    repairs = await reconcile.sweep_runs(env)

    assert await run_of(env, accepted.run) == before
    assert repairs == reconcile.SweepResult()


async def test_a_sweep_reads_every_live_run_over_several_pages(
    env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_PAGE", 3)
    accepted = [await submit(env, 1) for _ in range(10)]
    for submitted in accepted:
        await env.commit(termination.request_stop(submitted.run, reason=None, now=env.now()))

    repairs = await reconcile.sweep_runs(env)

    assert repairs.stopped == 10


async def test_a_stalled_list_is_ingested(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, LATER_FROM)
    fresh = await reconcile.stalled_batches(env, idle_s=30)
    clock.advance(31)

    for batch in await reconcile.stalled_batches(env, idle_s=30):
        await reconcile.finish_batch(env, batch)

    run = await run_of(env, accepted.run)
    assert fresh == []
    assert (run.total, run.open_batches) == (LATER_FROM, 0)
    assert await reconcile.stalled_batches(env, idle_s=-1) == []


async def test_an_ingest_that_its_submit_did_not_begin_is_finished(
    env: Context, clock: ManualClock
) -> None:
    fault = Fault(1, When.BEFORE, only="put_chunk")
    with suppress(Unavailable):
        await submit(with_fault(env, fault), 120)
    clock.advance(31)

    (batch,) = await reconcile.stalled_batches(env, idle_s=30)
    await reconcile.finish_batch(env, batch)

    assert await ingest.open_batches_of(env, batch.job_id, batch.run_id) == []


async def test_a_stalled_batch_of_a_stopped_run_is_closed(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, LATER_FROM)
    await runs.stop(env, CALLER, accepted.job.job_id)
    clock.advance(31)

    for batch in await reconcile.stalled_batches(env, idle_s=30):
        await reconcile.finish_batch(env, batch)

    assert await reconcile.stalled_batches(env, idle_s=-1) == []
    assert (await run_of(env, accepted.run)).status is RunStatus.STOPPED


@dataclass(frozen=True, slots=True)
class ClosingLog:
    """A queue that records which runs' queues were removed."""

    inner: Queue
    closed: list[RunId] = field(default_factory=list)

    async def close_run(self, run_id: RunId) -> None:
        self.closed.append(run_id)
        await self.inner.close_run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_the_queue_that_a_crash_left_after_its_run_ended_is_removed(
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


async def test_a_sweep_removes_queues_of_runs_that_ended_shortly_before_the_previous_sweep(
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


async def test_a_second_sweep_changes_nothing(env: Context) -> None:
    accepted = await submit(env, 3)
    await env.queue.close_run(accepted.run.run_id)
    await reconcile.sweep_runs(env)

    repairs = await reconcile.sweep_runs(env)

    assert repairs == reconcile.SweepResult()
    assert (await env.queue.depth(accepted.run.run_id)).visible == 3
