"""Reruns of all tasks or of some, and results that stay with the run that produced them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from conveyor.domain.errors import Conflict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Job, Run, RunStatus, Task, TaskStatus
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest, rerun, runs
from conveyor.usecases.run.rerun import Rerun
from tests.builders import CALLER, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    LATER_FROM,
    add,
    body_of,
    check_counters,
    missing,
    rows_of,
    run_of,
    submit,
    work,
)

FAILED = frozenset({TaskStatus.FAILED})
SIZES = [
    pytest.param(5, id="at once"),
    pytest.param(120, id="inline"),
    pytest.param(LATER_FROM, id="later"),
]


async def ingest_open(env: Context, run: Run) -> None:
    for batch in await ingest.open_batches_of(env, run.job_id, run.run_id):
        taken = await ingest.acquire_batch(env, batch)
        assert taken is not None
        await ingest.ingest_batch(env, taken)


async def a_finished_job(env: Context, count: int, *, number: int = 500) -> tuple[Job, Run]:
    """A job whose first run has ended: the first two tasks failed, the others have results."""
    accepted = await submit(env, count, job_id=JobId(a_ulid(number)))
    await ingest_open(env, accepted.run)
    await work(env, accepted.run, missing([0, 1]))
    run = await run_of(env, accepted.run)
    assert run.status is RunStatus.COMPLETED
    return accepted.job, run


async def start_rerun(
    env: Context, job: Job, retry: frozenset[TaskStatus] | None = None, *, number: int | None = None
) -> Rerun:
    run_id = RunId(env.new_id() if number is None else a_ulid(number))
    return await rerun.rerun(env, CALLER, job.job_id, retry=retry, run_id=run_id)


def by_id(rows: list[Task]) -> dict[str, Task]:
    return {row.task_id: row for row in rows}


@pytest.mark.parametrize("count", SIZES)
async def test_a_full_rerun_starts_every_task_over_under_its_own_id(
    env: Context, count: int
) -> None:
    job, first = await a_finished_job(env, count)

    second = await start_rerun(env, job)
    await ingest_open(env, second.run)

    assert (second.retried, second.inherited, second.rerun_of) == (count, 0, first.run_id)
    before, after = by_id(await rows_of(env, first)), by_id(await rows_of(env, second.run))
    assert before.keys() == after.keys()
    assert {row.status for row in after.values()} == {TaskStatus.PENDING}
    assert all(after[key].index == before[key].index for key in before)
    await work(env, second.run)
    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED
    await check_counters(env, await run_of(env, second.run))


@pytest.mark.parametrize("count", SIZES)
async def test_a_partial_rerun_inherits_what_it_does_not_retry(env: Context, count: int) -> None:
    job, first = await a_finished_job(env, count)

    second = await start_rerun(env, job, FAILED)
    await ingest_open(env, second.run)
    took = await work(env, second.run)

    run = await run_of(env, second.run)
    assert (second.retried, second.inherited) == (2, count - 2)
    assert took == 2
    assert run.status is RunStatus.COMPLETED
    assert run.source_run_ids == (first.run_id,)
    totals = await check_counters(env, run)
    assert (totals.successful, totals.failed) == (count, 0)
    inherited = [row for row in await rows_of(env, run) if row.source_run_id == first.run_id]
    assert len(inherited) == count - 2


async def test_an_inherited_result_is_read_from_the_run_that_produced_it(env: Context) -> None:
    job, first = await a_finished_job(env, 5)
    second = await start_rerun(env, job, FAILED)
    (row, *_) = [row for row in await rows_of(env, second.run) if row.source_run_id]

    body = await body_of(env, second.run, row.task_id)

    assert row.result is not None
    assert f"/runs/{first.run_id}/" in row.result.key
    assert body == b"<html>"


async def test_a_chain_of_reruns_keeps_the_owner_of_each_result(env: Context) -> None:
    job, first = await a_finished_job(env, 5)
    second = await start_rerun(env, job, FAILED)
    await work(env, second.run, missing([0]))
    third = await start_rerun(env, job, FAILED)
    await work(env, third.run)

    run = await run_of(env, third.run)
    owners = {row.index: row.source_run_id for row in await rows_of(env, run)}
    assert owners == {
        0: None,
        1: second.run.run_id,
        2: first.run_id,
        3: first.run_id,
        4: first.run_id,
    }
    assert set(run.source_run_ids) == {first.run_id, second.run.run_id}


@pytest.mark.parametrize("count", SIZES)
async def test_a_run_whose_results_are_inherited_cannot_be_deleted(
    env: Context, count: int
) -> None:
    job, first = await a_finished_job(env, count)
    second = await start_rerun(env, job, FAILED)

    with pytest.raises(Conflict) as early:
        await runs.delete_run(env, CALLER, job.job_id, first.run_id)
    await ingest_open(env, second.run)
    await work(env, second.run)
    with pytest.raises(Conflict) as late:
        await runs.delete_run(env, CALLER, job.job_id, first.run_id)

    assert early.value.code == late.value.code == "run_has_descendants"


async def test_a_run_can_be_deleted_once_nothing_is_inherited_from_it(env: Context) -> None:
    job, first = await a_finished_job(env, 5)
    second = await start_rerun(env, job)
    await work(env, second.run)

    await runs.delete_run(env, CALLER, job.job_id, first.run_id)

    assert (await run_of(env, first)).status is RunStatus.DELETED
    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED


async def test_after_deleting_the_latest_run_the_previous_one_is_the_latest(env: Context) -> None:
    job, first = await a_finished_job(env, 5)
    second = await start_rerun(env, job)

    await runs.delete_run(env, CALLER, job.job_id, second.run.run_id)
    third = await start_rerun(env, job)

    assert third.rerun_of == first.run_id
    assert third.run.sequence == 3


async def test_a_live_run_cannot_be_rerun(env: Context) -> None:
    accepted = await submit(env, 2)

    with pytest.raises(Conflict) as refusal:
        await start_rerun(env, accepted.job)

    assert refusal.value.code == "run_not_terminal"


async def test_a_filter_that_matches_no_task_is_a_conflict(env: Context) -> None:
    accepted = await submit(env, 2)
    await work(env, accepted.run)

    with pytest.raises(Conflict) as refusal:
        await start_rerun(env, accepted.job, FAILED)

    assert refusal.value.code == "no_matching_tasks"


async def test_tasks_that_a_stop_left_unfinished_are_retried_under_any_filter(env: Context) -> None:
    accepted = await submit(env, 5)
    await work(env, accepted.run, missing([0, 1, 2, 3, 4]), count=1)
    await runs.stop(env, CALLER, accepted.job.job_id)

    second = await start_rerun(env, accepted.job, FAILED)
    await work(env, second.run)

    assert second.retried == 5
    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED


async def test_concurrent_reruns_start_one_run(env: Context) -> None:
    for number in range(10):
        job, _ = await a_finished_job(env, 3, number=600 + number)
        started: list[Rerun] = []

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(_try_again, env, job, started)

        assert len(started) == 1
        assert started[0].run.sequence == 2


async def _try_again(env: Context, job: Job, started: list[Rerun]) -> None:
    with suppress(Conflict):
        started.append(await start_rerun(env, job))


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("count", SIZES)
async def test_a_rerun_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, count: int, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job, first = await a_finished_job(env, count, number=10_000 + at)
        fault = Fault(at, when)

        with suppress(Unavailable):
            await start_rerun(with_fault(env, fault), job, FAILED, number=20_000 + at)
        second = await start_rerun(env, job, FAILED, number=20_000 + at)
        await ingest_open(env, second.run)

        run = await run_of(env, second.run)
        totals = await check_counters(env, run)
        assert totals.admitted == run.total == run.planned == count
        assert (second.retried, second.inherited) == (2, count - 2)
        assert run.source_run_ids == (first.run_id,)
        assert await work(env, run) >= 2
        assert (await run_of(env, run)).status is RunStatus.COMPLETED
        goes_on = fault.was_reached
    assert at > 2


async def a_job_stopped_in_ingest(env: Context) -> tuple[Job, Run]:
    accepted = await submit(env, LATER_FROM)
    stopped = await runs.stop(env, CALLER, accepted.job.job_id)
    assert stopped.run.open_batches == 1
    return accepted.job, stopped.run


async def test_a_run_stopped_during_ingest_is_rerun_from_its_list(env: Context) -> None:
    job, first = await a_job_stopped_in_ingest(env)

    second = await start_rerun(env, job)
    await ingest_open(env, second.run)
    await work(env, second.run)

    run = await run_of(env, second.run)
    assert second.is_later
    assert await rows_of(env, first) == []
    assert (run.status, run.total) == (RunStatus.COMPLETED, LATER_FROM)


async def test_a_rerun_of_a_run_stopped_during_ingest_accepts_no_filter(env: Context) -> None:
    job, _ = await a_job_stopped_in_ingest(env)

    with pytest.raises(Conflict) as refusal:
        await start_rerun(env, job, FAILED)

    assert refusal.value.code == "ingest_incomplete"


async def test_a_run_cannot_be_deleted_while_a_rerun_reads_its_list(env: Context) -> None:
    job, first = await a_job_stopped_in_ingest(env)
    await start_rerun(env, job)

    with pytest.raises(Conflict) as refusal:
        await runs.delete_run(env, CALLER, job.job_id, first.run_id)

    assert refusal.value.code == "run_has_descendants"


async def test_all_lists_of_an_open_job_are_rerun(env: Context) -> None:
    opened = await submit(env, 3, is_open=True)
    await add(env, opened.job, 2, batch="small")
    fault = Fault(1, When.BEFORE, only="put_chunk")
    with suppress(Unavailable):
        await add(with_fault(env, fault), opened.job, 120, batch="large")
    await runs.stop(env, CALLER, opened.job.job_id)

    second = await start_rerun(env, opened.job)
    await ingest_open(env, second.run)
    await work(env, second.run)

    run = await run_of(env, second.run)
    assert (run.status, run.total) == (RunStatus.COMPLETED, 125)
    assert len({row.task_id for row in await rows_of(env, run)}) == 125
    await check_counters(env, run)


async def test_a_full_rerun_ignores_the_filter_of_a_rerun_that_was_stopped_during_ingest(
    env: Context,
) -> None:
    job, _ = await a_finished_job(env, LATER_FROM)
    await start_rerun(env, job, FAILED)
    await runs.stop(env, CALLER, job.job_id)

    third = await start_rerun(env, job)
    await ingest_open(env, third.run)

    rows = await rows_of(env, third.run)
    assert third.retried == LATER_FROM == len(rows)
    assert {row.status for row in rows} == {TaskStatus.PENDING}
