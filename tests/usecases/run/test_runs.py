"""Stopping, failing and pausing a run: first its counters, then the work, then its status."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.errors import Conflict, NotFound
from conveyor.domain.ids import JobId
from conveyor.domain.model import (
    CounterState,
    PauseState,
    Run,
    RunFailure,
    RunStatus,
    TaskRef,
    TaskStatus,
    Webhook,
)
from conveyor.domain.run import settlement, termination
from conveyor.domain.run.settlement import Claimed, Cost, RunClosed
from conveyor.ports.errors import Unavailable
from conveyor.usecases import webhook
from conveyor.usecases.context import Context
from conveyor.usecases.run import reconcile, runs, tasks
from tests.builders import CALLER, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    PAGE,
    SignalLog,
    check_counters,
    gates_of,
    rows_of,
    run_of,
    submit,
    work,
)


async def _claim_one(env: Context, run: Run) -> tuple[TaskRef, Claimed]:
    (message,) = await env.queue.receive(run.run_id, count_max=1, visibility_s=60)
    claim = (await tasks.claim(env, [message.ref]))[0]
    assert isinstance(claim, Claimed)
    return message.ref, claim


async def test_a_stop_ends_the_run_and_clears_the_active_run_of_its_job(
    env: Context, signals: SignalLog
) -> None:
    accepted = await submit(env, 5)
    await work(env, accepted.run, count=2)

    stopped = await runs.stop(env, CALLER, accepted.job.job_id, reason="enough")

    assert (stopped.run.status, stopped.run.stop_reason) == (RunStatus.STOPPED, "enough")
    assert stopped.totals.done == 2
    assert await gates_of(env, stopped.run) == {CounterState.CLOSED}
    assert ("teardown", stopped.run.run_id) in signals.said
    assert (await submit(env, 5, job_id=accepted.job.job_id)).job.active_run_id is None


async def test_stopping_again_returns_the_same_result(env: Context) -> None:
    accepted = await submit(env, 5)
    first = await runs.stop(env, CALLER, accepted.job.job_id)

    again = await runs.stop(env, CALLER, accepted.job.job_id)

    assert again.run == first.run


async def test_a_completed_run_cannot_be_stopped(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)

    with pytest.raises(Conflict) as refusal:
        await runs.stop(env, CALLER, accepted.job.job_id)

    assert refusal.value.code == "run_not_stoppable"


async def test_no_task_settles_once_a_stop_is_requested(env: Context) -> None:
    accepted = await submit(env, 2)
    ref, claim = await _claim_one(env, accepted.run)
    await env.commit(termination.request_stop(accepted.run, reason=None, now=env.now()))

    result = await tasks.store_body(env, ref, claim, PAGE)
    change = settlement.succeed(ref, claim.task, result, spent=Cost(), now=env.now())
    verdict = settlement.settle_result(await env.commit(change), claim.task)

    assert verdict == RunClosed()
    assert (await check_counters(env, accepted.run)).done == 0


async def test_a_claim_can_be_released_while_the_run_drains(env: Context) -> None:
    accepted = await submit(env, 1)
    ref, claim = await _claim_one(env, accepted.run)
    await env.commit(termination.request_stop(accepted.run, reason=None, now=env.now()))

    await tasks.release_claim(env, ref, claim.task)

    (row,) = await rows_of(env, accepted.run)
    assert (row.status, row.attempts, row.claim) == (TaskStatus.PENDING, 0, 1)


async def test_no_task_of_a_stopped_run_changes(env: Context) -> None:
    accepted = await submit(env, 1)
    ref, claim = await _claim_one(env, accepted.run)
    await runs.stop(env, CALLER, accepted.job.job_id)
    before = await rows_of(env, accepted.run)

    await tasks.release_claim(env, ref, claim.task)
    assert not isinstance((await tasks.claim(env, [ref]))[0], Claimed)

    assert await rows_of(env, accepted.run) == before


async def _stop(env: Context, job_id: str) -> None:
    with suppress(Conflict):
        await runs.stop(env, CALLER, job_id)


async def test_a_stop_concurrent_with_the_last_settle_ends_the_run_in_one_way_only(
    env: Context,
) -> None:
    ends = set()
    for number in range(40):
        accepted = await submit(
            env, 1, job_id=JobId(a_ulid(1000 + number)), webhook=Webhook("https://example.com/")
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, env, accepted.run)
            for _ in range(number % 8):
                await trio.lowlevel.checkpoint()
            nursery.start_soon(_stop, env, accepted.job.job_id)

        run = await run_of(env, accepted.run)
        totals = await check_counters(env, run)
        ends.add(run.status)
        assert run.status is (RunStatus.COMPLETED if totals.done else RunStatus.STOPPED)
        assert await gates_of(env, run) == {CounterState.CLOSED}
    run_ids = [notice.run_id for notice in await webhook.due(env, limit=1000)]
    assert len(run_ids) == len(set(run_ids)) == 40
    assert ends == {RunStatus.COMPLETED, RunStatus.STOPPED}


@pytest.mark.parametrize("when", list(When))
async def test_a_stop_interrupted_at_any_call_is_finished_by_the_sweeper(
    env: Context, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        accepted = await submit(env, 3, job_id=JobId(a_ulid(1000 + at)))
        fault = Fault(at, when)

        with suppress(Unavailable):
            await runs.stop(with_fault(env, fault), CALLER, accepted.job.job_id)
        was_requested = (await run_of(env, accepted.run)).stop_requested_at is not None
        await reconcile.sweep_runs(env)

        run = await run_of(env, accepted.run)
        assert run.status is (RunStatus.STOPPED if was_requested else RunStatus.RUNNING)
        goes_on = fault.was_reached
    assert at > 2


async def test_an_account_error_fails_the_run_once_its_work_has_ended(env: Context) -> None:
    accepted = await submit(env, 2)
    await runs.fail(env, accepted.run, RunFailure.INSUFFICIENT_CREDITS, "none left")
    half = await run_of(env, accepted.run)

    await runs.finish_stop(env, accepted.job.job_id, accepted.run.run_id)

    run = await run_of(env, accepted.run)
    assert half.status is RunStatus.RUNNING
    assert (run.status, run.failure_reason) == (
        RunStatus.FAILED,
        RunFailure.INSUFFICIENT_CREDITS,
    )


async def test_only_the_first_account_error_is_kept(env: Context) -> None:
    accepted = await submit(env, 2)
    await runs.fail(env, accepted.run, RunFailure.INSUFFICIENT_CREDITS, "first")

    await runs.fail(env, accepted.run, RunFailure.SUBSCRIPTION_INACTIVE, "second")

    run = await run_of(env, accepted.run)
    assert run.failure_detail == "first"


async def test_a_completion_check_does_not_end_a_run_that_is_being_stopped(env: Context) -> None:
    accepted = await submit(env, 1)
    ref, claim = await _claim_one(env, accepted.run)
    result = await tasks.store_body(env, ref, claim, PAGE)
    await env.commit(settlement.succeed(ref, claim.task, result, spent=Cost(), now=env.now()))
    await env.commit(termination.request_stop(accepted.run, reason="enough", now=env.now()))

    has_ended = await runs.complete_if_done(env, accepted.job.job_id, accepted.run.run_id)
    looked_at = await run_of(env, accepted.run)
    ended = await runs.finish_stop(env, accepted.job.job_id, accepted.run.run_id)

    assert not has_ended
    assert looked_at.status is RunStatus.RUNNING
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.COMPLETED, None)


async def test_only_a_live_run_has_a_pause_state(env: Context, signals: SignalLog) -> None:
    accepted = await submit(env, 1)

    paused = await runs.set_pause(env, CALLER, accepted.job.job_id, PauseState.PAUSED)
    again = await runs.set_pause(env, CALLER, accepted.job.job_id, PauseState.PAUSED)
    resumed = await runs.set_pause(env, CALLER, accepted.job.job_id, PauseState.ACTIVE)

    assert paused.pause_state is again.pause_state is PauseState.PAUSED
    assert resumed.pause_state is PauseState.ACTIVE
    assert signals.said.count(("run_changed", accepted.run.run_id)) == 4


async def test_an_ended_run_cannot_be_paused(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)

    with pytest.raises(Conflict) as refusal:
        await runs.set_pause(env, CALLER, accepted.job.job_id, PauseState.PAUSED)

    assert refusal.value.code == "run_not_pausable"


async def test_work_in_flight_may_still_settle_while_paused(env: Context) -> None:
    accepted = await submit(env, 1)
    await runs.set_pause(env, CALLER, accepted.job.job_id, PauseState.PAUSED)

    await work(env, accepted.run)

    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


async def test_a_job_of_another_caller_cannot_be_stopped(env: Context) -> None:
    with pytest.raises(NotFound):
        await runs.stop(env, CALLER, a_ulid(5))


async def test_a_stop_waits_for_workers_that_may_not_have_read_the_run_yet(
    env: Context, autojump_clock: MockClock
) -> None:
    patient = replace(env, config=replace(env.config, unseen_s=4.0))
    accepted = await submit(patient, 2)
    began_at = trio.current_time()

    stopped = await runs.stop(patient, CALLER, accepted.job.job_id)

    assert stopped.receipt.complete
    assert trio.current_time() - began_at >= 4.0
