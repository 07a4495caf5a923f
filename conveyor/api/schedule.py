"""Scheduled jobs over HTTP: submit a job, replace, pause and resume its schedule
(docs/api.md, Schedules)."""

from __future__ import annotations

from functools import partial

from conveyor.api.route import Command, Example, Route
from conveyor.api.runs import STORAGE_QUOTAS
from conveyor.api.server.request import RequestContext, Response, Work, json_reply
from conveyor.domain.changes import JobKey
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.model import Job
from conveyor.domain.run.wait_reason import RunOverview
from conveyor.domain.schedule import Overlap, Rule, ScheduleStatus
from conveyor.schemas.requests import decode_schedule, decode_schedule_state
from conveyor.schemas.responses import JobResponse, SubmitJobResponse
from conveyor.schemas.schedule import JobSchedule, UpdateScheduleStateRequest, rule_from, state_from
from conveyor.schemas.views import job_view, run_view, scheduled_view, webhook_view
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import latest_run, load_owned_job_and_run
from conveyor.usecases.run import run_progress
from conveyor.usecases.submit.jobs import Submission


async def show_job(env: Context, job: Job) -> JobResponse:
    """The response to a change. It contains the change: totals are not read from the cache."""
    run = await latest_run(env, job)
    overview = None if run is None else await run_progress.fresh_overview(env, run)
    return await _view(env, job, overview)


async def cached_job_response(env: Context, job: Job) -> JobResponse:
    """The response to a read. The totals of its run may come from the cache."""
    run = await latest_run(env, job)
    overview = None if run is None else await run_progress.cached_overview(env, job, run)
    return await _view(env, job, overview)


async def load_job_response(env: Context, caller: CallerId, job_id: str) -> JobResponse:
    """The response to a read of one job, in one step if it was seen before."""
    seen = env.seen_runs.find(caller, job_id)
    reads = [] if seen is None else run_progress.reads_of_overview(env, seen)
    job, run, results = await load_owned_job_and_run(env, caller, job_id, *reads)
    if run is None:
        return await _view(env, job, None)
    # The counters must not be older than the run beside them. They are not if the run is still as
    # it was before they were read.
    if run != seen:
        return await _view(env, job, await run_progress.cached_overview(env, job, run))
    return await _view(env, job, run_progress.overview_of(env, job, run, results))


async def _view(env: Context, job: Job, overview: RunOverview | None) -> JobResponse:
    view = job_view(job, None if overview is None else run_view(overview))
    schedule = await schedules.schedule_of(env, job)
    return view if schedule is None else scheduled_view(view, schedule, env.now())


def submit(call: RequestContext, schedule: JobSchedule | None, submission: Submission) -> Work:
    if schedule is None:
        raise InvalidArgument("A scheduled job needs a schedule.", pointer="/schedule")
    rule = rule_from(schedule, pointer="/schedule", now=call.env.now())
    return partial(_submit, call, submission, rule, Overlap(schedule.overlap))


async def _submit(
    call: RequestContext, submission: Submission, rule: Rule, overlap: Overlap, job_id: str
) -> Response:
    find_existing = partial(call.env.store.read, JobKey(JobId(job_id)))
    async with call.api.storage.admit(
        call.caller, STORAGE_QUOTAS, find_existing, bytes_sent=submission.bytes_sent
    ):
        scheduled = await schedules.submit(
            call.env, call.caller, submission, rule, overlap, job_id=JobId(job_id)
        )
    body = SubmitJobResponse(
        job_id=scheduled.job.job_id,
        status=scheduled.job.status,
        accepted_tasks=scheduled.schedule.total,
        webhook=webhook_view(scheduled.job.webhook),
    )
    return json_reply(body, 201)


def replace(call: RequestContext) -> Work:
    schedule = decode_schedule(call.body)
    rule = rule_from(schedule, pointer="", now=call.env.now())
    return partial(_replace, call, rule, Overlap(schedule.overlap))


async def _replace(call: RequestContext, rule: Rule, overlap: Overlap, _: str) -> Response:
    job_id = call.ids["job_id"]
    scheduled = await schedules.replace(call.env, call.caller, job_id, rule, overlap)
    return json_reply(await show_job(call.env, scheduled.job))


def set_state(call: RequestContext) -> Work:
    return partial(_set_state, call, state_from(decode_schedule_state(call.body)))


async def _set_state(call: RequestContext, state: ScheduleStatus, _: str) -> Response:
    scheduled = await schedules.set_state(call.env, call.caller, call.ids["job_id"], state)
    return json_reply(await show_job(call.env, scheduled.job))


_SCHEDULE = "/v1/jobs/{job_id}/schedule"

ROUTES: tuple[Route, ...] = (
    Route(
        method="PUT",
        path=_SCHEDULE,
        name="updateJobSchedule",
        tag="jobs",
        summary="Replace the schedule of a scheduled job",
        description="Replaces the rule of a scheduled job as a whole.",
        example=Example(body={"cron": "0 9 * * mon-fri", "timezone": "Europe/Berlin"}),
        does=Command(replace, JobSchedule),
        answers={200: JobResponse},
        problems=(409,),
    ),
    Route(
        method="POST",
        path=_SCHEDULE + "/state",
        name="updateScheduleState",
        tag="jobs",
        summary="Pause or resume the schedule of a job",
        description=(
            "Pauses or resumes the schedule of a job. A paused schedule starts no run; runs that "
            "exist continue."
        ),
        example=Example(body={"schedule_state": "paused"}),
        does=Command(set_state, UpdateScheduleStateRequest),
        answers={200: JobResponse},
    ),
)
