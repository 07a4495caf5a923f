"""Retention: some days after the results of a run have expired, nothing of the run is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conveyor.domain import limits
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import RunId
from conveyor.domain.model import Run, TaskStatus
from conveyor.domain.queries import DueExpiries
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.run import reconcile
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, ManualClock
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.run.test_results_expiry import DAY, an_ended_run, bodies_of
from tests.usecases.world import rows_of, run_of, work


async def sweep(env: Context) -> None:
    """The retention steps of the sweeper, in its order."""
    await reconcile.sweep_expired(env)
    await reconcile.remove_old_rows(env)


async def delete_fully(env: Context, clock: ManualClock) -> None:
    for _ in range(3):
        while await reconcile.delete_due(env):
            pass
        clock.advance(limits.TOMBSTONE_TTL_S)


async def test_the_rows_of_a_run_stay_for_the_configured_days_and_are_then_deleted(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env, days=2)
    clock.advance(2 * DAY)
    await sweep(env)

    clock.advance(30 * DAY - 1)
    await sweep(env)
    rows_before = len(await rows_of(env, run))
    clock.advance(1)
    await sweep(env)
    await delete_fully(env, clock)

    assert rows_before == 4
    with pytest.raises(NotFound):
        await load_owned_job(env, CALLER, run.job_id)
    assert await env.store.read(RunKey(run.job_id, run.run_id)) is None
    assert await rows_of(env, run) == []
    assert await env.store.read(JobKey(run.job_id)) is None


async def test_a_run_that_was_not_swept_in_time_loses_bodies_and_rows_together(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env, days=2)
    clock.advance(100 * DAY)

    await sweep(env)
    await delete_fully(env, clock)

    assert await rows_of(env, run) == []
    assert await bodies_of(env, run) == 0


async def test_the_number_of_days_is_a_setting(env: Context, clock: ManualClock) -> None:
    env = replace(env, config=replace(env.config, row_days=1))
    run = await an_ended_run(env, days=2)
    clock.advance(3 * DAY)

    await sweep(env)

    with pytest.raises(NotFound):
        await load_owned_job(env, CALLER, run.job_id)


async def test_a_job_is_kept_while_one_of_its_runs_is_not_old(
    env: Context, clock: ManualClock
) -> None:
    first = await an_ended_run(env, days=2)
    clock.advance(30 * DAY)
    await sweep(env)
    again = await _rerun_all(env, first)
    clock.advance(2 * DAY)

    await sweep(env)

    assert (await load_owned_job(env, CALLER, first.job_id)).latest_run_id == again.run_id
    assert not await _is_visible(env, first)
    assert await _is_visible(env, again)


async def test_a_run_is_kept_while_another_run_inherits_its_results(
    env: Context, clock: ManualClock
) -> None:
    first = await an_ended_run(env, days=2)
    clock.advance(DAY)
    again = await rerun(
        env, CALLER, first.job_id, retry=frozenset({TaskStatus.FAILED}), run_id=RunId(env.new_id())
    )
    await work(env, again.run)
    clock.advance(31 * DAY)

    await sweep(env)
    was_kept = await _is_visible(env, first)
    for _ in range(3):
        clock.advance(2 * DAY)
        await sweep(env)

    assert was_kept
    with pytest.raises(NotFound):
        await load_owned_job(env, CALLER, first.job_id)


@pytest.mark.parametrize("when", When)
async def test_a_removal_that_fails_at_any_call_is_finished_by_the_next(
    env: Context, clock: ManualClock, when: When
) -> None:
    at, was_reached = 0, True
    while was_reached:
        at += 1
        run = await an_ended_run(env)
        clock.advance(32 * DAY)
        fault = Fault(at, when)
        try:
            await reconcile.remove_old_rows(with_fault(env, fault))
        except Unavailable:
            await reconcile.remove_old_rows(env)
        with pytest.raises(NotFound):
            await load_owned_job(env, CALLER, run.job_id)
        was_reached = fault.was_reached
    assert at > 3


async def test_the_removal_of_old_rows_ignores_a_deleted_job(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env)
    await jobs.delete(env, CALLER, run.job_id)
    clock.advance(32 * DAY)

    assert await reconcile.remove_old_rows(env) == 0
    assert await env.store.find(DueExpiries(due_by=1e12, limit=10)) == []


async def _rerun_all(env: Context, run: Run) -> Run:
    again = await rerun(env, CALLER, run.job_id, retry=None, run_id=RunId(env.new_id()))
    await work(env, again.run)
    return await run_of(env, again.run)


async def _is_visible(env: Context, run: Run) -> bool:
    row = await env.store.read(RunKey(run.job_id, run.run_id))
    return row is not None and row.status != "deleted"
