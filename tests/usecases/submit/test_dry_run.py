"""Dry runs: refused and counted like the real request, and nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from conveyor.domain import limits
from conveyor.domain.budget import FREE, PriceRange
from conveyor.domain.changes import InputKey, JobKey, RunKey
from conveyor.domain.errors import InvalidTasks
from conveyor.domain.ids import InputId, JobId, RunId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import ListFormat, ListSpec, TaskStatus
from conveyor.domain.queries import JobsOf
from conveyor.domain.schedule import Overlap
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.submit.scraper_params import Params
from conveyor.ports.blobs import Blobs
from conveyor.ports.errors import StorageFull
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.run.rerun import RerunFilter, rerun
from conveyor.usecases.submit import jobs, upload
from conveyor.usecases.submit.dry_run import preview_rerun, preview_submit, rehearse
from conveyor.usecases.submit.jobs import Submission
from tests.builders import CALLER
from tests.usecases.scheduled import HOURLY
from tests.usecases.world import LATER_FROM, missing, some_drafts, submit, with_config, work

BAD = TaskDraft(url="ftp://example.com/")


def with_remote_gateway(env: Context) -> Context:
    """The same ports, with a remote gateway that fetches pages and charges for them."""
    return with_config(env, targets=None)  # type: ignore[arg-type]


def submitting(request: Submission) -> Callable[[Context], Any]:
    return lambda env: jobs.submit(env, CALLER, request, job_id=JobId(env.new_id()))


async def jobs_count(env: Context) -> int:
    query = JobsOf(caller=CALLER, statuses=JOB_VISIBLE, before=None, limit=10)
    return len(await env.store.find(query))


@pytest.mark.parametrize("count", [3, 120, LATER_FROM])
async def test_a_dry_run_of_a_submit_returns_its_run_and_stores_nothing(
    env: Context, count: int
) -> None:
    rehearsed = await rehearse(env, submitting(Submission(drafts=some_drafts(count))))

    assert rehearsed.run is not None
    assert rehearsed.planned == rehearsed.run.planned == count
    assert await jobs_count(env) == 0
    assert await env.store.read(RunKey(rehearsed.run.job_id, rehearsed.run.run_id)) is None
    assert await env.blobs.delete_prefix(f"sources/{rehearsed.run.job_id}") == 0


async def test_a_dry_run_is_refused_like_the_request_itself(env: Context) -> None:
    request = Submission(drafts=[*some_drafts(2), BAD])

    details = []
    for attempt in (submitting(request)(env), rehearse(env, submitting(request))):
        with pytest.raises(InvalidTasks) as refusal:
            await attempt
        details.append((refusal.value.detail, refusal.value.invalid_tasks))

    assert details[0] == details[1]


async def test_a_dry_run_of_a_schedule_counts_its_tasks_and_stores_no_job(env: Context) -> None:
    job_id = JobId(env.new_id())

    rehearsed = await rehearse(
        env,
        lambda pretended: schedules.submit(
            pretended,
            CALLER,
            Submission(drafts=some_drafts(4)),
            HOURLY,
            Overlap.SKIP,
            job_id=job_id,
        ),
    )

    assert (rehearsed.run, rehearsed.planned) == (None, 4)
    assert await env.store.read(JobKey(job_id)) is None


async def test_a_dry_run_reads_an_uploaded_list_and_keeps_it(
    env: Context,
) -> None:
    slot = await upload.create(
        env, CALLER, ListSpec(ListFormat.TEXT), input_id=InputId(env.new_id())
    )
    await upload.fill(env, slot, some_lines(3))
    work_of = submitting(Submission(input_id=slot.input_id))

    rehearsed = await rehearse(env, work_of)
    real = await work_of(env)

    assert rehearsed.planned == real.accepted == 3
    assert await env.store.read(InputKey(slot.input_id)) is not None


async def some_lines(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield f"https://example.com/{number}\n".encode()


class FullBlobs:
    """Blobs without room for another body."""

    def __init__(self, inner: Blobs) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check_room(self) -> None:
        raise StorageFull("no room")


@pytest.mark.parametrize("count", [3, 120])
async def test_full_storage_refuses_a_dry_run(env: Context, count: int) -> None:
    full = replace(env, blobs=cast("Blobs", FullBlobs(env.blobs)))

    with pytest.raises(StorageFull):
        await rehearse(full, submitting(Submission(drafts=some_drafts(count))))


async def test_a_preview_counts_invalid_lines_by_reason_and_shows_the_first(env: Context) -> None:
    drafts = [*some_drafts(3), TaskDraft(url=7), *[BAD] * limits.INVALID_TASKS_SHOWN_MAX]

    preview = await preview_submit(env, Submission(drafts=drafts))

    assert preview.valid == 3
    assert preview.reasons == {
        "malformed_url": 1,
        "unsupported_scheme": limits.INVALID_TASKS_SHOWN_MAX,
    }
    assert preview.invalid == limits.INVALID_TASKS_SHOWN_MAX + 1
    indexes = [line.index for line in preview.invalid_tasks]
    assert indexes == list(range(3, 3 + limits.INVALID_TASKS_SHOWN_MAX))


async def test_only_valid_lines_fetched_by_a_remote_gateway_have_a_price(env: Context) -> None:
    rendered = TaskDraft(url="https://example.com/", params={"js_render": "true"})
    request = Submission(drafts=[rendered, *some_drafts(1), BAD], params=Params({}, None))

    preview = await preview_submit(with_remote_gateway(env), request)

    assert preview.price == PriceRange(6, 6)
    assert (await preview_submit(env, request)).price == FREE


async def test_a_preview_of_a_rerun_has_the_counts_of_the_rerun(env: Context) -> None:
    first = await submit(env, 5)
    await work(env, first.run, missing([0, 1]))
    charged, job_id = with_remote_gateway(env), first.job.job_id
    choice = RerunFilter(retry=frozenset({TaskStatus.FAILED}))

    async def attempt(pretended: Context) -> object:
        return await rerun(
            pretended, CALLER, job_id, retry=choice.retry, run_id=RunId(env.new_id())
        )

    planned = (await rehearse(charged, attempt)).run
    assert planned is not None
    preview = await preview_rerun(charged, CALLER, job_id, choice, planned)
    real = await rerun(env, CALLER, job_id, retry=choice.retry, run_id=RunId(env.new_id()))

    assert (preview.retried, preview.inherited) == (real.retried, real.inherited) == (2, 3)
    assert (preview.rerun_of, preview.price) == (first.run.run_id, PriceRange(2, 2))
