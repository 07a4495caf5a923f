"""No body is available for longer than the deployment keeps bodies, whatever happens to its run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from conveyor.domain.changes import JobKey
from conveyor.domain.errors import InvalidArgument, ResultExpired
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run, TaskStatus
from conveyor.domain.run.settlement import Claimed
from conveyor.domain.schedule import Overlap
from conveyor.usecases import export as exports
from conveyor.usecases import schedule
from conveyor.usecases.context import Context
from conveyor.usecases.export import Exported
from conveyor.usecases.run import audit, results, tasks
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.dry_run import rehearse
from conveyor.usecases.submit.jobs import Submission
from tests.builders import CALLER, T0, ManualClock, a_ulid
from tests.usecases.run.test_results_expiry import DAY
from tests.usecases.scheduled import HOURLY
from tests.usecases.test_export import file_of, lines_of, start_export
from tests.usecases.world import (
    MISS,
    PAGE,
    World,
    body_of,
    rows_of,
    run_of,
    some_drafts,
    submit,
    work,
)


def with_body_days(env: Context, days: int) -> Context:
    return replace(env, config=replace(env.config, body_days=days))


async def a_slow_run(env: Context, clock: ManualClock, *, days: int = 3) -> Run:
    """A live run whose first page was fetched at once, and whose second two days later."""
    accepted = await submit(env, 3, result_ttl_days=days)
    await work(env, accepted.run, count=1)
    clock.advance(2 * DAY)
    await work(env, accepted.run, count=1)
    return await run_of(env, accepted.run)


async def count_unexpired(env: Context, run: Run) -> int:
    """Counts the run's tasks whose body has not expired."""
    expiries = await results.expiries_of(env, run)
    rows = [row for row in await rows_of(env, run) if row.result is not None]
    return sum(not expiries.is_over(row) for row in rows)


async def test_a_result_expires_in_a_live_run_when_its_body_is_too_old(
    env: Context, clock: ManualClock
) -> None:
    env = with_body_days(env, 3)
    run = await a_slow_run(env, clock)
    first = next(row for row in await rows_of(env, run) if row.started_at == T0)

    clock.advance(DAY - 1)
    assert (await count_unexpired(env, run), await body_of(env, run, first.task_id)) == (
        2,
        PAGE.body,
    )
    clock.advance(1)

    assert run.expires_at is None
    assert await count_unexpired(env, run) == 1
    with pytest.raises(ResultExpired, match="2023-11-17T22:13:20Z"):
        await body_of(env, run, first.task_id)


async def test_a_body_expires_before_a_storage_rule_that_counts_from_its_upload_removes_it(
    env: Context, clock: ManualClock
) -> None:
    env = with_body_days(env, 1)
    run = (await submit(env, 1)).run
    (message,) = await env.queue.receive(run.run_id, count_max=1, visibility_s=60)
    (claimed,) = await tasks.claim(env, [message.ref])
    assert isinstance(claimed, Claimed)
    task = claimed.task
    clock.advance(100)
    result = await tasks.store_body(env, message.ref, claimed, PAGE)
    stored_at = clock.now()
    clock.advance(100)
    await env.commit(tasks.judge_success(env, message.ref, task, PAGE, result).change)

    (row,) = await rows_of(env, run)

    assert (await results.expiries_of(env, run)).instant_of(row) < stored_at + DAY


async def test_a_late_end_of_the_run_does_not_extend_the_life_of_a_body(
    env: Context, clock: ManualClock
) -> None:
    env = with_body_days(env, 3)
    run = await a_slow_run(env, clock)
    await work(env, run)
    ended = await run_of(env, run)

    clock.advance(DAY)

    assert ended.expires_at == T0 + 5 * DAY
    assert await count_unexpired(env, ended) == 2
    export = await start_export(env, ended)
    assert await exports.process(env, export) is Exported.COMPLETED
    *lines, _ = lines_of(await file_of(env, export))
    assert sorted(str(line["status"]) for line in lines) == ["expired", "successful", "successful"]


async def test_the_days_of_an_inherited_result_count_from_its_fetch(
    env: Context, clock: ManualClock
) -> None:
    """The first run lasts for two days and is kept for longer than the body that it fetched."""
    env = with_body_days(env, 3)
    first = (await submit(env, 2, result_ttl_days=3)).run
    await work(env, first, count=1)
    clock.advance(2 * DAY)
    await work(env, first, lambda _: MISS)
    shows = [await run_of(env, first)]
    for _ in range(2):
        again = await rerun(
            env, CALLER, first.job_id, retry=frozenset({TaskStatus.FAILED}), run_id=a_run_id(env)
        )
        await work(env, again.run, lambda _: MISS)
        shows.append(await run_of(env, again.run))

    clock.advance(DAY - 1)
    before = [await count_unexpired(env, run) for run in shows]
    clock.advance(1)

    assert (shows[0].expires_at, clock.now()) == (T0 + 5 * DAY, T0 + 3 * DAY)
    assert before == [1, 1, 1]
    assert [await count_unexpired(env, run) for run in shows] == [0, 0, 0]


async def test_an_export_started_before_an_expiry_and_built_after_it_lists_the_task_as_expired(
    world: World, env: Context, clock: ManualClock
) -> None:
    env = with_body_days(env, 3)
    run = await a_slow_run(env, clock)
    await work(env, run)
    ended = await run_of(env, run)
    clock.advance(DAY - 1)
    export = await start_export(env, ended)
    clock.advance(1)
    expiries = await results.expiries_of(env, ended)
    for row in await rows_of(env, ended):
        if row.result is not None and expiries.is_over(row):
            del world.engine.blobs._bodies[row.result.key]

    outcome = await exports.process(env, export)

    *lines, _ = lines_of(await file_of(env, export))
    assert outcome is Exported.COMPLETED
    assert sorted(str(line["status"]) for line in lines) == ["expired", "successful", "successful"]


async def test_an_audit_does_not_read_expired_bodies(
    world: World, env: Context, clock: ManualClock
) -> None:
    env = with_body_days(env, 3)
    run = await a_slow_run(env, clock)
    whole = await audit.audit(env, run)
    clock.advance(3 * DAY)
    world.engine.blobs._bodies.clear()

    seen = await audit.audit(env, run)

    assert (whole.bodies, whole.is_ok) == (2, True)
    assert (seen.bodies, seen.is_ok) == (0, True)


async def test_a_lower_number_of_days_applies_at_once_to_existing_results(
    env: Context, clock: ManualClock
) -> None:
    run = (await submit(env, 1, result_ttl_days=14)).run
    await work(env, run)
    ended = await run_of(env, run)
    clock.advance(2 * DAY)

    assert results.run_instant(env, ended) == T0 + 14 * DAY
    assert results.run_instant(with_body_days(env, 2), ended) == T0 + 2 * DAY
    assert (
        await count_unexpired(env, ended),
        await count_unexpired(with_body_days(env, 2), ended),
    ) == (1, 0)
    with pytest.raises(ResultExpired):
        await start_export(with_body_days(env, 2), ended)


@pytest.mark.parametrize(
    ("body_days", "ttl_days", "expected_days"),
    [(30, None, 14), (7, None, 7), (30, 30, 30), (7, 7, 7), (365, 365, 365), (1, 1, 1)],
)
async def test_results_are_kept_as_long_as_requested_up_to_fourteen_days(
    env: Context, body_days: int, ttl_days: int | None, expected_days: int
) -> None:
    accepted = await submit(with_body_days(env, body_days), 1, result_ttl_days=ttl_days)

    assert accepted.job.result_ttl_days == expected_days


async def by_submit(env: Context, request: Submission, job_id: JobId) -> None:
    await jobs.submit(env, CALLER, request, job_id=job_id)


async def by_schedule(env: Context, request: Submission, job_id: JobId) -> None:
    await schedule.submit(env, CALLER, request, HOURLY, Overlap.SKIP, job_id=job_id)


async def by_dry_run(env: Context, request: Submission, job_id: JobId) -> None:
    await rehearse(env, lambda apart: jobs.submit(apart, CALLER, request, job_id=job_id))


@pytest.mark.parametrize("submit_with", [by_submit, by_schedule, by_dry_run])
async def test_a_result_lifetime_longer_than_bodies_are_kept_is_refused(
    env: Context, submit_with: Callable[[Context, Submission, JobId], Awaitable[None]]
) -> None:
    request = Submission(drafts=some_drafts(1), result_ttl_days=8)
    job_id = JobId(a_ulid(900))

    with pytest.raises(InvalidArgument, match="at most 7 days") as refused:
        await submit_with(with_body_days(env, 7), request, job_id)

    assert refused.value.pointer == "/result_ttl_days"
    assert await env.store.read(JobKey(job_id)) is None


def a_run_id(env: Context) -> RunId:
    return RunId(env.new_id())
