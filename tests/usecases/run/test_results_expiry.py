"""Expiry: after the requested time the bodies are deleted and the rows are shown as expired."""

from __future__ import annotations

from contextlib import aclosing, suppress

import pytest

from conveyor.domain.errors import ResultExpired
from conveyor.domain.ids import RunId
from conveyor.domain.model import Run, TaskStatus
from conveyor.ports.errors import BlobMissing, Unavailable
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.run import reconcile, results
from conveyor.usecases.run.rerun import rerun
from tests.builders import CALLER, T0, ManualClock
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.test_export import file_of, lines_of, start_export
from tests.usecases.world import PAGE, body_of, missing, rows_of, run_of, submit, work

DAY = 86_400.0


async def an_ended_run(env: Context, *, days: int = 2) -> Run:
    accepted = await submit(env, 4, result_ttl_days=days)
    await work(env, accepted.run, missing([3]))
    return await run_of(env, accepted.run)


async def expired_indexes(env: Context, run: Run) -> list[bool]:
    """The indexes of the run's tasks that are shown as expired."""
    job = await load_owned_job(env, CALLER, run.job_id)
    page = await results.page(env, job, run, status="all", cursor=None, limit=100)
    ordered = sorted(page.tasks, key=lambda task: task.index)
    return [page.expiries.is_over(task) for task in ordered]


async def bodies_of(env: Context, run: Run) -> int:
    size = 0
    for task in await rows_of(env, run):
        if task.result is not None:
            with suppress(BlobMissing):
                async with aclosing(env.blobs.open(task.result.key)) as pieces:
                    size += len([piece async for piece in pieces])
    return size


async def test_only_an_ended_run_has_an_expiry(env: Context) -> None:
    accepted = await submit(env, 1, result_ttl_days=3)
    live = await run_of(env, accepted.run)
    await work(env, accepted.run)
    ended = await run_of(env, accepted.run)

    assert (live.expires_at, live.sweep_at) == (None, None)
    assert ended.expires_at == ended.sweep_at == T0 + 3 * DAY


async def test_results_expire_at_their_time_whether_or_not_a_sweep_ran(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env)
    good = next(task for task in await rows_of(env, run) if task.result is not None)

    clock.advance(2 * DAY - 1)
    assert await expired_indexes(env, run) == [False] * 4
    assert await body_of(env, run, good.task_id) == PAGE.body
    clock.advance(1)

    assert await expired_indexes(env, run) == [True, True, True, False]
    with pytest.raises(ResultExpired, match="2023-11-16T22:13:20Z"):
        await body_of(env, run, good.task_id)


async def test_a_sweep_removes_bodies_and_keeps_rows(env: Context, clock: ManualClock) -> None:
    run, other = await an_ended_run(env), await an_ended_run(env, days=9)
    clock.advance(2 * DAY)

    assert await reconcile.sweep_expired(env) == 1
    assert await reconcile.sweep_expired(env) == 0

    assert (await bodies_of(env, run), await bodies_of(env, other)) == (0, 3)
    assert len(await rows_of(env, run)) == 4
    swept = await run_of(env, run)
    assert run.expires_at is not None
    assert (swept.sweep_at, swept.expires_at) == (run.expires_at + 30 * DAY, run.expires_at)


@pytest.mark.parametrize("when", When)
async def test_a_sweep_that_fails_at_any_call_is_finished_by_the_next(
    env: Context, clock: ManualClock, when: When
) -> None:
    at, was_reached = 0, True
    while was_reached:
        at += 1
        run = await an_ended_run(env)
        clock.advance(2 * DAY)
        fault = Fault(at, when)
        try:
            await reconcile.sweep_expired(with_fault(env, fault))
        except Unavailable:
            await reconcile.sweep_expired(env)
        assert await bodies_of(env, run) == 0
        assert (await run_of(env, run)).sweep_at == (run.expires_at or 0) + 30 * DAY
        was_reached = fault.was_reached
    assert at > 3


async def test_an_inherited_result_expires_with_the_run_that_produced_it(
    env: Context, clock: ManualClock
) -> None:
    first = await an_ended_run(env)
    clock.advance(DAY)
    again = await rerun(
        env, CALLER, first.job_id, retry=frozenset({TaskStatus.FAILED}), run_id=RunId(env.new_id())
    )
    await work(env, again.run)
    clock.advance(DAY)
    run = await run_of(env, again.run)

    assert await expired_indexes(env, run) == [True, True, True, False]
    export = await start_export(env, run)
    await exports.process(env, export)

    *lines, _ = lines_of(await file_of(env, export))
    statuses = {line["index"]: line["status"] for line in lines}
    assert statuses == {0: "expired", 1: "expired", 2: "expired", 3: "successful"}
