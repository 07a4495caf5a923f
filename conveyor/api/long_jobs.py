"""Long lists of jobs over HTTP: where they are laid down, and what comes of them
(docs/api.md, Submitting lists)."""

from __future__ import annotations

from functools import partial

import msgspec

from conveyor.api import jobs
from conveyor.api.call import Call, Work
from conveyor.api.long_bodies import TakesLongLists
from conveyor.domain.ids import FIRST_BATCH, BatchId, JobId, RunId
from conveyor.domain.model import Job, JobStatus, StagedList
from conveyor.usecases import long_lists, open_jobs
from conveyor.usecases.long_lists import Intake, LongList
from conveyor.usecases.staging import OnInvalid
from conveyor.wire.requests import decode_add_tasks, decode_submit, malformed


async def _place_of_submit(call: Call, subject: str) -> tuple[Job, StagedList]:
    """For a job of which nothing is known yet but what its lines must be sealed for."""
    now = call.env.now()
    job = Job(JobId(subject), call.caller, JobStatus.CLOSED, now, now)
    return job, long_lists.place(call.env, job, RunId(call.env.mint()), FIRST_BATCH)


def _submit(call: Call, intake: Intake, staged: LongList | None) -> Work:
    request = decode_submit(call.body)
    if request.tasks is None and staged is not None:
        raise malformed("it names a long list of tasks twice", pointer="/tasks")
    asked = jobs.submission_from(call, request)
    if staged is not None and request.file_input_id is not None:
        jobs.refuse_both()
    intake.refuse_invalid(asked.on_invalid, asked.params.values)
    intake.refuse_growth(call.sent.size_bytes)
    return jobs.work_of(call, request, msgspec.structs.replace(asked, staged=staged))


async def _place_of_add(call: Call, subject: str) -> tuple[Job, StagedList]:
    return await open_jobs.place_for(call.env, call.caller, call.ids["job_id"], BatchId(subject))


def _add_tasks(call: Call, intake: Intake, staged: LongList | None) -> Work:
    request = decode_add_tasks(call.body)
    intake.refuse_invalid(OnInvalid[request.on_invalid.upper()], {})
    intake.refuse_growth(call.sent.size_bytes)
    return partial(jobs.feed, call, request, staged or ())


SUBMIT = TakesLongLists(_place_of_submit, _submit)
ADD_TASKS = TakesLongLists(_place_of_add, _add_tasks)
