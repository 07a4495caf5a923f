"""Bad lines that may be skipped: tasks that have failed already, counted like any other."""

from __future__ import annotations

import pytest

from conveyor.domain.errors import InvalidTasks
from conveyor.domain.ids import BatchId, JobId, RunId
from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest, reconcile, rerun
from conveyor.usecases.run.ingest import open_batches_of
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted, Submission
from conveyor.usecases.submit.staging import OnInvalid
from tests.builders import CALLER
from tests.usecases.world import LATER_FROM, check_counters, rows_of, run_of, some_drafts, work

BAD = [
    TaskDraft(url="ftp://example.com/"),
    TaskDraft(url=7, external_id="seven"),
    TaskDraft(url="https://example.com/x", external_id="kept", method="PATCH"),
    TaskDraft(url="https://u:secret@example.com/?token"),
]
# One list per path: at once, staged and ingested before the answer, and after it.
COUNTS = [10, 100, LATER_FROM]


def mixed(count: int) -> list[TaskDraft]:
    return [*BAD, *some_drafts(count - len(BAD))]


async def submit(env: Context, drafts: list[TaskDraft], *, is_open: bool = False) -> Accepted:
    request = Submission(drafts=drafts, on_invalid=OnInvalid.SKIP, is_open=is_open)
    return await jobs.submit(env, CALLER, request, job_id=JobId(env.new_id()))


async def ingest_rest(env: Context, accepted: Accepted) -> None:
    for batch in await open_batches_of(env, accepted.job.job_id, accepted.run.run_id):
        await reconcile.finish_batch(env, batch)


@pytest.mark.parametrize("count", COUNTS)
async def test_bad_lines_of_a_submit_become_failed_tasks_on_every_path(
    env: Context, count: int
) -> None:
    accepted = await submit(env, mixed(count))
    await ingest_rest(env, accepted)

    totals = await check_counters(env, accepted.run)
    rows = sorted(await rows_of(env, accepted.run), key=lambda row: row.index)
    failed = [row for row in rows if row.status is TaskStatus.FAILED]
    assert (accepted.accepted, totals.admitted, totals.failed) == (count, count, len(BAD))
    assert [row.index for row in failed] == [0, 1, 2, 3]
    assert [row.problem.code for row in failed if row.problem] == [
        "unsupported_scheme",
        "malformed_url",
        "unsupported_method",
        "malformed_url",
    ]
    assert [row.url for row in failed] == [
        "ftp://example.com/",
        "",
        "https://example.com/x",
        "https",
    ]
    assert [row.external_id for row in failed] == [None, "seven", "kept", None]
    assert await work(env, accepted.run) == count - len(BAD)
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("count", COUNTS)
async def test_bad_lines_that_are_added_become_failed_tasks_too(env: Context, count: int) -> None:
    job = (await submit(env, [], is_open=True)).job

    added = await jobs.add_tasks(
        env,
        CALLER,
        job.job_id,
        mixed(count),
        is_last=True,
        batch_id=BatchId("b"),
        on_invalid=OnInvalid.SKIP,
    )
    for batch in await ingest.open_batches_of(env, job.job_id, added.run.run_id):
        await reconcile.finish_batch(env, batch)

    totals = await check_counters(env, added.run)
    assert (added.accepted, totals.admitted, totals.failed) == (count, count, len(BAD))
    assert await work(env, added.run) == count - len(BAD)
    assert (await run_of(env, added.run)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("count", COUNTS)
async def test_a_rerun_refuses_bad_lines_again_and_fetches_none_of_them(
    env: Context, count: int
) -> None:
    first = await submit(env, mixed(count))
    await ingest_rest(env, first)
    await work(env, first.run)

    second = await rerun.rerun(env, CALLER, first.job.job_id, run_id=RunId(env.new_id()))
    for batch in await open_batches_of(env, first.job.job_id, second.run.run_id):
        await reconcile.finish_batch(env, batch)

    assert await work(env, second.run) == count - len(BAD)
    failed = [row for row in await rows_of(env, second.run) if row.status is TaskStatus.FAILED]
    assert sorted(row.index for row in failed) == [0, 1, 2, 3]
    assert all(row.problem is not None and not row.claim for row in failed)
    await check_counters(env, second.run)
    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED


async def test_a_rerun_of_nothing_but_bad_lines_is_complete_at_once(env: Context) -> None:
    first = await submit(env, BAD)

    second = await rerun.rerun(env, CALLER, first.job.job_id, run_id=RunId(env.new_id()))

    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED


async def test_a_job_of_nothing_but_bad_lines_is_complete_at_once(env: Context) -> None:
    accepted = await submit(env, BAD)

    assert accepted.run.status is RunStatus.COMPLETED
    assert (accepted.run.total, accepted.totals.failed) == (len(BAD), len(BAD))


async def test_without_leave_to_skip_the_list_is_refused(env: Context) -> None:
    with pytest.raises(InvalidTasks) as caught:
        await jobs.submit(env, CALLER, Submission(drafts=mixed(10)), job_id=JobId(env.new_id()))

    assert "4 of 10 tasks" in caught.value.detail
    assert [task.index for task in caught.value.invalid_tasks] == [0, 1, 2, 3]
