"""Jobs over HTTP: submit, list, show, add tasks, close, rerun, delete
(docs/api.md, Submitting lists)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from conveyor.api import dry_run, job_search, schedule
from conveyor.api.route import (
    CURSOR,
    DRY_RUN,
    LIMIT,
    Command,
    Example,
    Parameter,
    Query,
    Route,
    make_handler,
)
from conveyor.api.runs import STORAGE_QUOTAS
from conveyor.api.schedule import cached_job_response, load_job_response, show_job
from conveyor.api.server.request import RequestContext, Response, Work, json_reply
from conveyor.api.streaming_submit import StreamingSubmit
from conveyor.domain import limits, queries
from conveyor.domain.budget import BudgetCap
from conveyor.domain.changes import JobKey
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import FIRST_BATCH, BatchId, JobId, RunId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import HostLimits, Job, JobStatus, JobType, StagedList, Webhook
from conveyor.domain.queries import JobsOf
from conveyor.domain.quota import Quota
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import Refusal, TaskDraft
from conveyor.domain.submit.scraper_params import InvalidParam, Params, check_params
from conveyor.schemas.requests import (
    AddTasksRequest,
    BudgetInput,
    HostLimitsInput,
    SubmitJobRequest,
    WebhookInput,
    cap_from,
    decode_add_tasks,
    decode_budget,
    decode_host_limits,
    decode_submit,
    drafts_of,
    escape_pointer,
    host_limits_from,
    malformed,
)
from conveyor.schemas.responses import (
    AddTasksResponse,
    JobResponse,
    ListJobsResponse,
    SubmitDryRunResponse,
    SubmitJobResponse,
)
from conveyor.schemas.views import run_view, webhook_view
from conveyor.usecases import budget
from conveyor.usecases import webhook as webhooks
from conveyor.usecases.context import Context
from conveyor.usecases.run import run_progress
from conveyor.usecases.run.results import owner_scope
from conveyor.usecases.submit import jobs, staging
from conveyor.usecases.submit.jobs import Submission
from conveyor.usecases.submit.staging import OnInvalid, StagedTasks, StreamingValidator


def submit(call: RequestContext) -> Work:
    request = decode_submit(call.body)
    submission = submission_from(call, request)
    if call.is_dry_run:
        make_work = partial(work_of, request=request, submission=submission)
        return partial(dry_run.submit, call, submission, make_work)
    return work_of(call, request, submission)


def work_of(call: RequestContext, request: SubmitJobRequest, submission: Submission) -> Work:
    if JobType(request.type) is JobType.SCHEDULED:
        return schedule.submit(call, request.schedule, submission)
    return partial(_submit, call, submission)


async def _submit(call: RequestContext, submission: Submission, job_id: str) -> Response:
    if submission.webhook is not None:
        await webhooks.validate_new(
            call.env, call.api.notifier, call.caller, submission.webhook, JobId(job_id)
        )
    opened = (Quota.OPEN_JOBS,) if submission.is_open else ()
    # None for an uploaded list: the body of this request says nothing about its size.
    bytes_sent = None if submission.input_id is not None else call.sent.size_bytes
    stored = (Quota.LIVE_RUNS, *opened, *STORAGE_QUOTAS)
    find_existing = partial(call.env.store.read, JobKey(JobId(job_id)))
    async with call.api.storage.admit(call.caller, stored, find_existing, bytes_sent=bytes_sent):
        accepted = await jobs.submit(call.env, call.caller, submission, job_id=JobId(job_id))
    overview = await run_progress.fresh_overview(call.env, accepted.run, accepted.totals)
    body = SubmitJobResponse(
        job_id=accepted.job.job_id,
        status=accepted.job.status,
        accepted_tasks=accepted.accepted,
        latest_run=run_view(overview),
        webhook=webhook_view(accepted.job.webhook),
    )
    return json_reply(body, 202 if accepted.is_later else 201)


def submission_from(call: RequestContext, request: SubmitJobRequest) -> Submission:
    if request.file_input_id is not None:
        _refuse_unfit_for_upload(request)
    assert call.principal is not None
    return Submission(
        drafts=drafts_of(request.tasks or []),
        input_id=request.file_input_id,
        on_invalid=OnInvalid[request.on_invalid.upper()],
        is_open=JobStatus(request.status) is JobStatus.OPEN,
        params=params_from(call.env, request.zenrows_params),
        external_id=request.external_id,
        name=request.name,
        metadata=_metadata_from(request),
        webhook=webhook_input_from(call.env, request.webhook),
        max_inflight=request.max_inflight,
        max_attempts=request.max_attempts,
        priority=request.priority,
        result_ttl_days=request.result_ttl_days,
        budget=cap_from(request.budget) if request.budget else None,
        host_limits=host_limits_from(request.host_limits),
        dedup=request.dedup,
        api_key=call.principal.forwarded_key,
        task_token=_task_token_from(call.env, request),
        bytes_sent=call.sent.size_bytes,
    )


def _task_token_from(env: Context, request: SubmitJobRequest) -> str | None:
    token, pointer = request.sfn_task_token, "/sfn_task_token"
    if token is None:
        return None
    if env.workflows is None:
        raise InvalidArgument(
            "sfn_task_token needs the aws engine: this server cannot call Step Functions.",
            pointer=pointer,
            code="step_functions_unavailable",
        )
    if JobType(request.type) is JobType.SCHEDULED:
        raise InvalidArgument(
            "sfn_task_token cannot be used with a schedule: a token can be completed only once.",
            pointer=pointer,
        )
    return token


def _both_lists() -> InvalidArgument:
    return InvalidArgument(
        "Send either tasks or a file_input_id, not both.", pointer="/file_input_id"
    )


def _refuse_unfit_for_upload(request: SubmitJobRequest) -> None:
    if request.tasks:
        raise _both_lists()
    if JobStatus(request.status) is JobStatus.OPEN:
        raise Conflict(
            "A job with an uploaded list is closed. Send the tasks of an open job in the request.",
            code="file_input_unsupported_for_job_type",
        )


def params_from(env: Context, zenrows_params: dict[str, Any] | None) -> Params:
    try:
        params = check_params(zenrows_params or {})
        env.config.gateway.check(params.values)
        return params
    except InvalidParam as error:
        pointer = "/zenrows_params/" + escape_pointer(error.key)
        raise InvalidArgument(error.detail, pointer=pointer) from None


def _metadata_from(request: SubmitJobRequest) -> dict[str, str] | None:
    try:
        return admission.check_metadata(request.metadata)
    except Refusal as refusal:
        raise InvalidArgument(
            f"metadata may have up to {limits.METADATA_KEYS_MAX} values of up to "
            f"{limits.METADATA_VALUE_CHARS_MAX} characters, with printable names.",
            pointer="/metadata",
            code=refusal.reason,
        ) from None


def webhook_input_from(env: Context, webhook: WebhookInput | None) -> Webhook | None:
    if webhook is None:
        return None
    return webhooks.make_webhook(env, webhook.url, signature=webhook.signature, pointer="/webhook")


class LongSubmit(StreamingSubmit):
    """A submit whose list is staged while it arrives."""

    async def locate(self) -> tuple[Job, StagedList]:
        # A provisional job: only the fields that the staging of its lines needs.
        env, now = self.call.env, self.call.env.now()
        job = Job(JobId(self.resource_id), self.call.caller, JobStatus.CLOSED, now, now)
        return job, staging.staging_key(env, job, RunId(env.new_id()), FIRST_BATCH)

    def make_work(
        self, body: bytes, validator: StreamingValidator, tasks: StagedTasks | None
    ) -> Work:
        request = decode_submit(body)
        if request.tasks is None and tasks is not None:
            raise malformed("it names tasks twice", pointer="/tasks")
        submission = submission_from(self.call, request)
        if tasks is not None and request.file_input_id is not None:
            raise _both_lists()
        validator.refuse_invalid(submission.on_invalid, submission.params.values)
        validator.refuse_growth(self.call.sent.size_bytes)
        return work_of(self.call, request, msgspec.structs.replace(submission, staged=tasks))


async def list_jobs(call: RequestContext) -> Response:
    status, kind = call.parameter("status"), call.parameter("type")
    limit = call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX)
    statuses = JOB_VISIBLE if status is None else JOB_VISIBLE & {_job_status_from(status)}
    if kind is not None and kind not in set(JobType):
        raise InvalidArgument(f"type must be one of {', '.join(JobType)}.", pointer="/type")
    external_id, job_filter = call.parameter("external_id"), job_search.filter_from(call)
    # A cursor is valid for the list with the same conditions only.
    named = "" if external_id is None else f"|{external_id}"
    named += "" if job_filter.is_empty else f"|{job_filter.scope}"
    scope = owner_scope(call.caller, f"jobs|{status}|{kind}{named}")
    sign = partial(call.env.secret_box.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    before = None if cursor is None else queries.read_cursor(cursor, scope=scope, sign=sign)
    if not statuses:
        return json_reply(ListJobsResponse([], None))
    query = JobsOf(
        caller=call.caller,
        statuses=statuses,
        type=JobType(kind) if kind is not None else None,
        external_id=external_id,
        before=JobId(before) if before is not None else None,
        limit=limit + 1,
    )
    if not job_filter.is_empty:
        page = msgspec.structs.replace(query, limit=limit)
        matching, until = await job_search.find_matching(call.env, page, job_filter)
        position = None if until is None else queries.make_cursor(until, scope=scope, sign=sign)
        return json_reply(ListJobsResponse(matching, position))
    # The query asks for one row more than the page, which shows whether another page follows.
    rows = await call.env.store.find(query)
    views = [await cached_job_response(call.env, job) for job in rows[:limit]]
    has_more = len(rows) > limit
    next_cursor = (
        queries.make_cursor(rows[limit - 1].job_id, scope=scope, sign=sign) if has_more else None
    )
    return json_reply(ListJobsResponse(views, next_cursor))


def _job_status_from(text: str) -> JobStatus:
    if text not in set(JobStatus):
        raise InvalidArgument(f"status must be one of {', '.join(JobStatus)}.", pointer="/status")
    return JobStatus(text)


async def get_job(call: RequestContext) -> Response:
    return json_reply(await load_job_response(call.env, call.caller, call.ids["job_id"]))


async def delete_job(call: RequestContext, _: str) -> Response:
    await jobs.delete(call.env, call.caller, call.ids["job_id"])
    return Response(202)


def add_tasks(call: RequestContext) -> Work:
    request = decode_add_tasks(call.body)
    return partial(_add_tasks, call, request, drafts_of(request.tasks))


async def _add_tasks(
    call: RequestContext,
    request: AddTasksRequest,
    drafts: Sequence[TaskDraft] | StagedTasks,
    batch_id: str,
) -> Response:
    sent = call.sent.size_bytes
    if not isinstance(drafts, StagedTasks):
        job_id = call.ids["job_id"]
        await jobs.refuse_growth(call.env, call.caller, job_id, drafts, bytes_sent=sent)
    find_existing = partial(
        jobs.find_batch, call.env, call.caller, call.ids["job_id"], BatchId(batch_id)
    )
    async with call.api.storage.admit(call.caller, STORAGE_QUOTAS, find_existing, bytes_sent=sent):
        accepted = await jobs.add_tasks(
            call.env,
            call.caller,
            call.ids["job_id"],
            drafts,
            is_last=request.last_batch,
            batch_id=BatchId(batch_id),
            on_invalid=OnInvalid[request.on_invalid.upper()],
        )
    overview = await run_progress.fresh_overview(call.env, accepted.run, accepted.totals)
    body = AddTasksResponse(
        accepted_tasks=accepted.accepted,
        job_status=accepted.job.status,
        latest_run=run_view(overview),
    )
    return json_reply(body)


class LongAddTasks(StreamingSubmit):
    """A list for an open job, which is staged while it arrives."""

    async def locate(self) -> tuple[Job, StagedList]:
        job_id, batch_id = self.call.ids["job_id"], BatchId(self.resource_id)
        return await jobs.place_for(self.call.env, self.call.caller, job_id, batch_id)

    def make_work(
        self, body: bytes, validator: StreamingValidator, tasks: StagedTasks | None
    ) -> Work:
        request = decode_add_tasks(body)
        validator.refuse_invalid(OnInvalid[request.on_invalid.upper()], {})
        validator.refuse_growth(self.call.sent.size_bytes)
        return partial(_add_tasks, self.call, request, tasks or ())


async def close(call: RequestContext, _: str) -> Response:
    job = await jobs.close(call.env, call.caller, call.ids["job_id"])
    return json_reply(await show_job(call.env, job))


def set_budget(call: RequestContext) -> Work:
    cap = cap_from(decode_budget(call.body), at="")
    return partial(_set_budget, call, cap)


async def _set_budget(call: RequestContext, cap: BudgetCap, _: str) -> Response:
    job = await budget.set_cap(call.env, call.caller, call.ids["job_id"], cap)
    return json_reply(await show_job(call.env, job))


def put_host_limits(call: RequestContext) -> Work:
    new_limits = host_limits_from(decode_host_limits(call.body))
    return partial(_set_host_limits, call, new_limits)


def delete_host_limits(call: RequestContext) -> Work:
    return partial(_set_host_limits, call, None)


async def _set_host_limits(call: RequestContext, new_limits: HostLimits | None, _: str) -> Response:
    job = await jobs.set_host_limits(call.env, call.caller, call.ids["job_id"], new_limits)
    return json_reply(await show_job(call.env, job))


JOB_STATUS = Parameter(
    "status", {"type": "string", "enum": list(JobStatus)}, "Only jobs with this value."
)
JOB_TYPE = Parameter(
    "type", {"type": "string", "enum": list(JobType)}, "Only jobs with this value."
)
JOB_EXTERNAL_ID = Parameter(
    "external_id", {"type": "string"}, "Only jobs that were submitted with this `external_id`."
)

_JOB = "/v1/jobs/{job_id}"

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/jobs",
        name="submitJob",
        tag="jobs",
        summary="Submit a job",
        description=(
            "Creates a job with its list and starts its first run. The response is 201 when the "
            "tasks exist, and 202 when the list is ingested afterwards. Send an Idempotency-Key, "
            "so that a repetition after a lost response creates no second job."
        ),
        example=Example(
            body={
                "name": "prices",
                "tasks": [
                    {"url": "https://shop.example/a", "external_id": "a"},
                    {"url": "https://shop.example/b"},
                ],
                "max_inflight": 20,
            },
            status=201,
        ),
        does=Command(submit, SubmitJobRequest, long=LongSubmit),
        answers={
            200: SubmitDryRunResponse,
            201: SubmitJobResponse,
            202: SubmitJobResponse,
        },
        problems=(404,),
        query=(DRY_RUN,),
        gives={"job_id": "/job_id", "run_id": "/latest_run/run_id"},
    ),
    Route(
        method="GET",
        path="/v1/jobs",
        name="listJobs",
        tag="jobs",
        summary="List your jobs, newest first",
        description=(
            "Lists the caller's jobs, newest first, with their latest runs. The filters may be "
            "combined. A page may be short: only a null `next_cursor` means that nothing is left."
        ),
        example=Example(query={"status": "closed", "limit": "10"}),
        does=Query(list_jobs),
        answers={200: ListJobsResponse},
        query=(JOB_STATUS, JOB_TYPE, JOB_EXTERNAL_ID, *job_search.FILTERS, LIMIT, CURSOR),
    ),
    Route(
        method="GET",
        path=_JOB,
        name="getJob",
        tag="jobs",
        summary="Show a job and its latest run",
        description=(
            "Shows the settings of a job and the counts, the rate and the wait reason of its "
            "latest run."
        ),
        does=Query(get_job),
        answers={200: JobResponse},
    ),
    Route(
        method="DELETE",
        path=_JOB,
        name="deleteJob",
        tag="jobs",
        summary="Delete a job with its runs and results",
        description=(
            "Deletes a job with all runs, results and exports. A live run is stopped first. The "
            "rows are removed after the response; callers do not see the job any more."
        ),
        does=Command(make_handler(delete_job)),
        answers={202: None},
    ),
    Route(
        method="POST",
        path=_JOB + "/tasks",
        name="addTasks",
        tag="tasks",
        summary="Add a list to an open job",
        description=(
            "Adds a list to the first run of an open job. With `last_batch` the job is closed in "
            "the same step."
        ),
        example=Example(body={"tasks": [{"url": "https://shop.example/c"}], "last_batch": True}),
        does=Command(add_tasks, AddTasksRequest, long=LongAddTasks),
        answers={200: AddTasksResponse},
    ),
    Route(
        method="POST",
        path=_JOB + "/close",
        name="closeJob",
        tag="jobs",
        summary="Close an open job: it accepts no more tasks",
        description=(
            "Closes an open job: it accepts no further list, and its run completes when every task "
            "has ended. The operation has no effect on a closed job."
        ),
        does=Command(make_handler(close)),
        answers={200: JobResponse},
    ),
    Route(
        method="PUT",
        path=_JOB + "/host_limits",
        name="setJobHostLimits",
        tag="jobs",
        summary="Change the host limits, for runs that start from now on",
        description="Replaces the host limits of a job. Runs that start afterwards obey them.",
        example=Example(
            body={"concurrency": 2, "hosts": {"slow.example": {"rate_per_s": 0.5}}},
        ),
        does=Command(put_host_limits, HostLimitsInput),
        answers={200: JobResponse},
    ),
    Route(
        method="DELETE",
        path=_JOB + "/host_limits",
        name="deleteJobHostLimits",
        tag="jobs",
        summary="Remove the host limits, for runs that start from now on",
        description="Removes the host limits of a job. Runs that start afterwards have none.",
        does=Command(delete_host_limits),
        answers={200: JobResponse},
    ),
    Route(
        method="PUT",
        path=_JOB + "/budget",
        name="setJobBudget",
        tag="jobs",
        summary="Change the budget; a run that waits for it continues",
        description=(
            "Changes the most that each run of the job may spend. A live run that waits for its "
            "budget continues. The budget cannot be less than what is spent or reserved."
        ),
        example=Example(body={"credits": 5000}),
        does=Command(set_budget, BudgetInput),
        answers={200: JobResponse},
        problems=(409,),
    ),
)
