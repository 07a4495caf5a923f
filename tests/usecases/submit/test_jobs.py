"""Submitting: lists of every size have the same outcome, and a retry finishes what was begun."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from conveyor.domain.changes import JobKey
from conveyor.domain.errors import InvalidArgument, InvalidTasks
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import IngestStatus, JobStatus, RunStatus
from conveyor.domain.submit.admission import TaskDraft
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted, Submission
from tests.builders import CALLER, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    LATER_FROM,
    SignalLog,
    check_counters,
    rows_of,
    run_of,
    some_drafts,
    submit,
    urls_of,
    work,
)

THREE_PATHS = [
    pytest.param(3, id="at once"),
    pytest.param(120, id="inline"),
    pytest.param(LATER_FROM + 5, id="later"),
]


async def _ingest_what_is_open(env: Context, job_id: JobId, run_id: RunId) -> None:
    for batch in await ingest.open_batches_of(env, job_id, run_id):
        taken = await ingest.acquire_batch(env, batch)
        assert taken is not None
        await ingest.ingest_batch(env, taken)


@pytest.mark.parametrize("count", THREE_PATHS)
async def test_a_list_becomes_tasks_and_the_run_completes_for_every_size(
    env: Context, count: int
) -> None:
    accepted = await submit(env, count)
    await _ingest_what_is_open(env, accepted.job.job_id, accepted.run.run_id)
    await work(env, accepted.run)

    run = await run_of(env, accepted.run)
    totals = await check_counters(env, run)
    assert accepted.accepted == count
    assert (run.status, run.total, run.planned) == (RunStatus.COMPLETED, count, count)
    assert totals.successful == count
    assert urls_of(await rows_of(env, run)) == urls_of_drafts(count)


def urls_of_drafts(count: int) -> list[str]:
    return sorted(str(draft.url) for draft in some_drafts(count))


@pytest.mark.parametrize(("count", "is_later"), [(3, False), (120, False), (LATER_FROM, True)])
async def test_only_a_large_list_is_ingested_after_the_answer(
    env: Context, signals: SignalLog, count: int, is_later: bool
) -> None:
    accepted = await submit(env, count)

    assert accepted.is_later is is_later
    assert accepted.run.ingest_status is (IngestStatus.PENDING if is_later else None)
    assert accepted.run.planned == count
    assert accepted.run.total == (0 if is_later else count)
    assert (("batch_opened", accepted.run.run_id) in signals.said) is is_later
    assert ("run_changed", accepted.run.run_id) in signals.said


async def test_small_closed_jobs_have_one_shard_and_others_have_several(env: Context) -> None:
    small = await submit(env, 3)
    growing = await submit(env, 3, is_open=True)
    large = await submit(env, LATER_FROM)

    assert [accepted.job.shard_count for accepted in (small, growing, large)] == [1, 4, 4]
    assert [accepted.run.shard_count for accepted in (small, growing, large)] == [1, 4, 4]


async def test_an_open_job_may_start_without_tasks(env: Context) -> None:
    accepted = await submit(env, 0, is_open=True)

    assert accepted.accepted == 0
    assert accepted.job.status is JobStatus.OPEN
    assert accepted.run.status is RunStatus.RUNNING


async def test_a_closed_job_without_tasks_is_refused(env: Context) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await submit(env, 0)

    assert refusal.value.pointer == "/tasks"


async def test_one_invalid_line_refuses_the_list_and_creates_nothing(env: Context) -> None:
    drafts = [*some_drafts(2), TaskDraft(url="ftp://example.com/"), TaskDraft(url=5)]
    job_id = JobId(env.new_id())

    with pytest.raises(InvalidTasks) as refusal:
        await jobs.submit(env, CALLER, Submission(drafts=drafts), job_id=job_id)

    assert [line.index for line in refusal.value.invalid_tasks] == [2, 3]
    assert await env.store.read(JobKey(job_id)) is None


@pytest.mark.parametrize("count", THREE_PATHS)
async def test_submitting_again_under_the_same_id_returns_the_same_job(
    env: Context, count: int
) -> None:
    job_id = JobId(env.new_id())
    first = await submit(env, count, job_id=job_id)

    again = await submit(env, count, job_id=job_id)

    assert again.run.run_id == first.run.run_id
    assert again.accepted == first.accepted == count
    assert again.is_later is first.is_later
    assert again.job.runs_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("count", THREE_PATHS)
async def test_a_submit_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, count: int, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job_id = JobId(a_ulid(1000 + at))
        fault = Fault(at, when)

        with suppress(Unavailable):
            await submit(with_fault(env, fault), count, job_id=job_id)
        accepted = await submit(env, count, job_id=job_id)
        await _ingest_what_is_open(env, job_id, accepted.run.run_id)

        run = await run_of(env, accepted.run)
        totals = await check_counters(env, run)
        assert accepted.accepted == count
        assert totals.admitted == run.total == run.planned == count
        assert run.open_batches == 0
        assert urls_of(await rows_of(env, run)) == urls_of_drafts(count)
        await work(env, run)
        assert (await run_of(env, run)).status is RunStatus.COMPLETED
        goes_on = fault.was_reached
    assert at > 2


@pytest.mark.parametrize("count", THREE_PATHS)
async def test_concurrent_submits_under_one_id_create_one_job(env: Context, count: int) -> None:
    for number in range(10):
        answers: list[Accepted] = []
        job_id = JobId(a_ulid(2000 + number))

        async def try_it(job_id: JobId = job_id, answers: list[Accepted] = answers) -> None:
            answers.append(await submit(env, count, job_id=job_id))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(try_it)

        assert {answer.run.run_id for answer in answers} == {answers[0].run.run_id}
        assert [answer.accepted for answer in answers] == [count] * 3
        await _ingest_what_is_open(env, job_id, answers[0].run.run_id)
        run = await run_of(env, answers[0].run)
        assert (await check_counters(env, run)).admitted == run.total == count


async def test_the_queue_of_a_run_is_created_with_it(env: Context) -> None:
    accepted = await submit(env, 0, is_open=True)

    # Receiving from a queue that does not exist raises QueueGone.
    assert await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60) == []
