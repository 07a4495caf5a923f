"""Open jobs: lists are added one by one, and closing excludes adding."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import JobId
from conveyor.domain.lifecycle import displayed_status
from conveyor.domain.model import Job, JobStatus, RunStatus
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import ingest, reconcile, runs
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    LATER_FROM,
    World,
    add,
    check_counters,
    rows_of,
    run_of,
    submit,
    work,
)


@pytest.mark.parametrize("count", [3, 120])
async def test_an_added_list_is_admitted_before_the_answer(env: Context, count: int) -> None:
    opened = await submit(env, 2, is_open=True)

    accepted = await add(env, opened.job, count)

    assert accepted.accepted == count
    assert not accepted.is_later
    assert accepted.run.total == accepted.totals.admitted == 2 + count
    assert accepted.job.status is JobStatus.OPEN
    await check_counters(env, accepted.run)


async def test_a_long_list_is_accepted_now_and_ingested_later(world: World) -> None:
    env = world.env
    opened = await submit(env, 2, is_open=True)

    accepted = await add(env, opened.job, LATER_FROM, is_last=True)
    again = await add(env, opened.job, LATER_FROM, is_last=True)

    assert accepted.is_later
    assert again.accepted == accepted.accepted == LATER_FROM
    assert (accepted.run.planned, accepted.run.total) == (2 + LATER_FROM, 2)
    assert world.signals.said.count(("batch_opened", opened.run.run_id)) == 2
    (batch,) = await ingest.open_batches_of(env, opened.job.job_id, opened.run.run_id)
    await reconcile.finish_batch(env, batch)
    await work(env, opened.run)
    ended = await run_of(env, opened.run)
    assert (ended.status, ended.total) == (RunStatus.COMPLETED, 2 + LATER_FROM)
    await check_counters(env, ended)


async def test_an_idle_open_run_is_pending_until_tasks_are_added(env: Context) -> None:
    opened = await submit(env, 2, is_open=True)
    await work(env, opened.run)
    idle = await run_of(env, opened.run)
    seen = displayed_status(idle, await totals_of(env, idle))

    fed = await add(env, opened.job, 1)

    assert seen is RunStatus.PENDING
    assert idle.status is RunStatus.RUNNING
    assert displayed_status(fed.run, await totals_of(env, fed.run)) is RunStatus.RUNNING


async def test_the_last_list_closes_the_job_and_lets_it_complete(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    await work(env, opened.run)

    accepted = await add(env, opened.job, 1, is_last=True)
    await work(env, opened.run)

    assert accepted.job.status is JobStatus.CLOSED
    assert (await run_of(env, opened.run)).status is RunStatus.COMPLETED


async def test_closing_a_job_without_tasks_completes_it(env: Context) -> None:
    opened = await submit(env, 0, is_open=True)

    job = await jobs.close(env, CALLER, opened.job.job_id)

    run = await run_of(env, opened.run)
    assert job.status is JobStatus.CLOSED
    assert (run.status, run.total) == (RunStatus.COMPLETED, 0)
    assert job.active_run_id is None


async def test_closing_a_job_after_its_last_settle_completes_the_run(env: Context) -> None:
    opened = await submit(env, 3, is_open=True)
    await work(env, opened.run)

    await jobs.close(env, CALLER, opened.job.job_id)

    assert (await run_of(env, opened.run)).status is RunStatus.COMPLETED


async def test_closing_a_job_again_changes_nothing(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    first = await jobs.close(env, CALLER, opened.job.job_id)

    again = await jobs.close(env, CALLER, opened.job.job_id)

    assert again == first


async def test_an_open_job_whose_run_was_stopped_can_be_closed(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    await runs.stop(env, CALLER, opened.job.job_id)

    job = await jobs.close(env, CALLER, opened.job.job_id)

    assert job.status is JobStatus.CLOSED
    assert (await run_of(env, opened.run)).status is RunStatus.STOPPED


async def test_an_open_job_whose_only_run_was_deleted_can_be_closed(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    await runs.stop(env, CALLER, opened.job.job_id)
    await runs.delete_run(env, CALLER, opened.job.job_id, opened.run.run_id)

    job = await jobs.close(env, CALLER, opened.job.job_id)

    assert job.status is JobStatus.CLOSED


async def test_a_closed_job_accepts_no_more_tasks(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    await jobs.close(env, CALLER, opened.job.job_id)

    with pytest.raises(Conflict) as refusal:
        await add(env, opened.job, 1)

    assert refusal.value.code == "last_batch_received"
    assert len(await rows_of(env, opened.run)) == 1


async def test_a_stopped_run_accepts_no_more_tasks(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    await runs.stop(env, CALLER, opened.job.job_id)

    with pytest.raises(Conflict) as refusal:
        await add(env, opened.job, 1)

    assert refusal.value.code == "job_not_open"


async def test_an_empty_list_creates_no_batch(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)

    with pytest.raises(InvalidArgument):
        await add(env, opened.job, 0)


async def test_adding_tasks_while_the_first_list_is_ingested_is_a_conflict_to_retry(
    env: Context,
) -> None:
    opened = await submit(env, LATER_FROM, is_open=True)

    with pytest.raises(Conflict) as refusal:
        await add(env, opened.job, 1)

    assert refusal.value.retry_after_s is not None


async def test_adding_under_the_same_batch_id_adds_once(env: Context) -> None:
    opened = await submit(env, 1, is_open=True)
    first = await add(env, opened.job, 5, batch="same")

    again = await add(env, opened.job, 5, batch="same")

    assert again.run.total == first.run.total == 6
    assert again.accepted == 5


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("count", [3, 120])
async def test_an_addition_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, count: int, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        opened = await submit(env, 2, is_open=True, job_id=JobId(a_ulid(1000 + at)))
        fault = Fault(at, when)

        with suppress(Unavailable):
            await add(with_fault(env, fault), opened.job, count, is_last=True)
        accepted = await add(env, opened.job, count, is_last=True)

        run = await run_of(env, opened.run)
        totals = await check_counters(env, run)
        assert accepted.accepted == count
        assert totals.admitted == run.total == run.planned == 2 + count
        await work(env, run)
        assert (await run_of(env, run)).status is RunStatus.COMPLETED
        goes_on = fault.was_reached
    assert at > 2


async def _try_to_add(env: Context, job: Job, added: list[int]) -> None:
    with suppress(Conflict):
        added.append((await add(env, job, 4)).accepted)


async def test_concurrent_adding_and_closing_leaves_no_task_unfinished(env: Context) -> None:
    for number in range(20):
        opened = await submit(env, 1, is_open=True, job_id=JobId(a_ulid(3000 + number)))
        added: list[int] = []

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_try_to_add, env, opened.job, added)
            nursery.start_soon(jobs.close, env, CALLER, opened.job.job_id)

        await work(env, opened.run)
        run = await run_of(env, opened.run)
        assert run.total == 1 + sum(added)
        assert run.status is RunStatus.COMPLETED
        await check_counters(env, run)


async def test_a_list_admitted_before_its_job_was_closed_is_still_ingested(
    env: Context,
) -> None:
    opened = await submit(env, 1, is_open=True)
    fault = Fault(1, When.BEFORE, only="put_chunk")
    with suppress(Unavailable):
        await add(with_fault(env, fault), opened.job, 120)
    waiting = await run_of(env, opened.run)
    await jobs.close(env, CALLER, opened.job.job_id)
    await work(env, opened.run)
    still = await run_of(env, opened.run)

    (batch,) = await ingest.open_batches_of(env, opened.job.job_id, opened.run.run_id)
    taken = await ingest.acquire_batch(env, batch)
    assert taken is not None
    await ingest.ingest_batch(env, taken)
    await work(env, opened.run)

    assert waiting.open_batches == 1
    assert still.status is RunStatus.RUNNING
    run = await run_of(env, opened.run)
    assert (run.status, run.total) == (RunStatus.COMPLETED, 121)
