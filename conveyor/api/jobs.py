"""Jobs over HTTP: submit, list, show, add tasks, close, rerun, delete
(docs/api.md, Submitting lists)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from typing import NoReturn, TypeVar

from conveyor.api import dry_run, schedule
from conveyor.api.runs import fresh_run_response
from conveyor.api.schedule import cached_job_response, show_job
from conveyor.api.server.request_context import RequestContext, Response, Work, json_reply
from conveyor.api.webhook import webhook_from
from conveyor.domain import limits, queries
from conveyor.domain.backpressure.budget import BudgetCap
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import BatchId, JobId, RunId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import FailureReason, JobStatus, JobType, TaskStatus, Webhook
from conveyor.domain.queries import JobsOf
from conveyor.domain.quota import Quota
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import Refusal, TaskDraft
from conveyor.domain.submit.scraper_params import InvalidParam, Params, check_params
from conveyor.domain.submit.target import host_of
from conveyor.schemas.budget import cap_from, host_limits_from
from conveyor.schemas.requests import (
    AddTasksRequest,
    SubmitJobRequest,
    WebhookInput,
    decode_add_tasks,
    decode_budget,
    decode_submit,
    drafts_of,
    escape_pointer,
)
from conveyor.schemas.responses import (
    AddTasksResponse,
    ListJobsResponse,
    RerunJobResponse,
    SubmitJobResponse,
)
from conveyor.schemas.views import webhook_view
from conveyor.usecases import budget, webhook
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.run import rerun as reruns
from conveyor.usecases.run.rerun import RerunFilter
from conveyor.usecases.run.results import owner_scope
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit import jobs as adding_tasks
from conveyor.usecases.submit.jobs import Submission
from conveyor.usecases.submit.staging import OnInvalid, StagedTasks

# The quotas that every request with tasks uses.
STORING = (Quota.STORED_TASKS, Quota.STORED_BYTES)


def submit(call: RequestContext) -> Work:
    request = decode_submit(call.body)
    asked = submission_from(call, request)
    if call.is_dry_run:
        return partial(dry_run.submit, call, asked, partial(work_of, request=request, asked=asked))
    return work_of(call, request, asked)


def work_of(call: RequestContext, request: SubmitJobRequest, asked: Submission) -> Work:
    if JobType(request.type) is JobType.SCHEDULED:
        return schedule.submit(call, request.schedule, asked)
    return partial(_submit, call, asked)


async def _submit(call: RequestContext, asked: Submission, job_id: str) -> Response:
    if asked.webhook is not None:
        await webhook.validate_new(
            call.env, call.api.notifier, call.caller, asked.webhook, JobId(job_id)
        )
    opened = (Quota.OPEN_JOBS,) if asked.is_open else ()
    # None for an uploaded list: the body of this request says nothing about its size.
    brought = None if asked.input_id is not None else call.sent.size_bytes
    stored = (Quota.LIVE_RUNS, *opened, *STORING)
    find_begun = partial(call.env.store.read, JobKey(JobId(job_id)))
    async with call.api.storage.admit(call.caller, stored, find_begun, bytes_sent=brought):
        accepted = await jobs.submit(call.env, call.caller, asked, job_id=JobId(job_id))
    body = SubmitJobResponse(
        job_id=accepted.job.job_id,
        status=accepted.job.status,
        accepted_tasks=accepted.accepted,
        latest_run=await fresh_run_response(call.env, accepted.run, accepted.totals),
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
        params=_params_from(request),
        external_id=request.external_id,
        name=request.name,
        metadata=_metadata_from(request),
        webhook=_webhook_from(call.env, request.webhook),
        max_inflight=request.max_inflight,
        max_attempts=request.max_attempts,
        priority=request.priority,
        result_ttl_days=request.result_ttl_days,
        budget=cap_from(request.budget) if request.budget else None,
        host_limits=host_limits_from(request.host_limits),
        api_key=call.principal.forwarded_key,
        task_token=_task_token_from(call.env, request),
        bytes_sent=call.sent.size_bytes,
    )


def refuse_both() -> NoReturn:
    raise InvalidArgument("Give tasks or a file_input_id, not both.", pointer="/file_input_id")


def _task_token_from(env: Context, request: SubmitJobRequest) -> str | None:
    token, pointer = request.sfn_task_token, "/sfn_task_token"
    if token is None:
        return None
    if env.workflows is None:
        raise InvalidArgument(
            "This server has no Step Functions to call back: its engine is not aws.",
            pointer=pointer,
            code="step_functions_unavailable",
        )
    if JobType(request.type) is JobType.SCHEDULED:
        raise InvalidArgument(
            "A task waits for one run: no schedule has just one.", pointer=pointer
        )
    return token


def _refuse_unfit_for_upload(request: SubmitJobRequest) -> None:
    if request.tasks:
        refuse_both()
    if JobStatus(request.status) is JobStatus.OPEN:
        raise Conflict(
            "An uploaded list makes a closed job; add tasks to an open one inline.",
            code="file_input_unsupported_for_job_type",
        )


def _params_from(request: SubmitJobRequest) -> Params:
    try:
        return check_params(request.zenrows_params or {})
    except InvalidParam as error:
        pointer = "/zenrows_params/" + escape_pointer(error.key)
        raise InvalidArgument(error.detail, pointer=pointer) from None


def _metadata_from(request: SubmitJobRequest) -> dict[str, str] | None:
    try:
        return admission.check_metadata(request.metadata)
    except Refusal as refusal:
        raise InvalidArgument(
            f"metadata holds up to {limits.METADATA_KEYS_MAX} texts of up to "
            f"{limits.METADATA_VALUE_CHARS_MAX} characters under printable names.",
            pointer="/metadata",
            code=refusal.reason,
        ) from None


def _webhook_from(env: Context, given: WebhookInput | None) -> Webhook | None:
    return None if given is None else webhook_from(env, given, pointer="/webhook")


async def list_jobs(call: RequestContext) -> Response:
    status, kind = call.parameter("status"), call.parameter("type")
    limit = call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX)
    statuses = JOB_VISIBLE if status is None else JOB_VISIBLE & {_job_status_from(status)}
    if kind is not None and kind not in set(JobType):
        raise InvalidArgument(f"type must be one of {', '.join(JobType)}.", pointer="/type")
    external_id = call.parameter("external_id")
    named = "" if external_id is None else f"|{external_id}"
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
    # The query asks for one row more than the page, which shows whether another page follows.
    rows = await call.env.store.find(query)
    shown = [await cached_job_response(call.env, job) for job in rows[:limit]]
    more = len(rows) > limit
    following = (
        queries.make_cursor(rows[limit - 1].job_id, scope=scope, sign=sign) if more else None
    )
    return json_reply(ListJobsResponse(shown, following))


def _job_status_from(text: str) -> JobStatus:
    if text not in set(JobStatus):
        raise InvalidArgument(f"status must be one of {', '.join(JobStatus)}.", pointer="/status")
    return JobStatus(text)


async def get_job(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    return json_reply(await cached_job_response(call.env, job))


def delete_job(call: RequestContext) -> Work:
    return partial(_delete_job, call)


async def _delete_job(call: RequestContext, _: str) -> Response:
    await jobs.delete(call.env, call.caller, call.ids["job_id"])
    return Response(202)


def add_tasks(call: RequestContext) -> Work:
    request = decode_add_tasks(call.body)
    return partial(run_add_tasks, call, request, drafts_of(request.tasks))


async def run_add_tasks(
    call: RequestContext,
    request: AddTasksRequest,
    drafts: Sequence[TaskDraft] | StagedTasks,
    batch_id: str,
) -> Response:
    sent = call.sent.size_bytes
    if not isinstance(drafts, StagedTasks):
        job_id = call.ids["job_id"]
        await adding_tasks.refuse_growth(call.env, call.caller, job_id, drafts, bytes_sent=sent)
    find_begun = partial(
        adding_tasks.find_batch, call.env, call.caller, call.ids["job_id"], BatchId(batch_id)
    )
    async with call.api.storage.admit(call.caller, STORING, find_begun, bytes_sent=sent):
        accepted = await adding_tasks.add_tasks(
            call.env,
            call.caller,
            call.ids["job_id"],
            drafts,
            is_last=request.last_batch,
            batch_id=BatchId(batch_id),
            on_invalid=OnInvalid[request.on_invalid.upper()],
        )
    body = AddTasksResponse(
        accepted_tasks=accepted.accepted,
        job_status=accepted.job.status,
        latest_run=await fresh_run_response(call.env, accepted.run, accepted.totals),
    )
    return json_reply(body)


def close(call: RequestContext) -> Work:
    return partial(_close, call)


async def _close(call: RequestContext, _: str) -> Response:
    job = await adding_tasks.close(call.env, call.caller, call.ids["job_id"])
    return json_reply(await show_job(call.env, job))


def set_budget(call: RequestContext) -> Work:
    cap = cap_from(decode_budget(call.body), at="")
    return partial(_set_budget, call, cap)


async def _set_budget(call: RequestContext, cap: BudgetCap, _: str) -> Response:
    job = await budget.set_cap(call.env, call.caller, call.ids["job_id"], cap)
    return json_reply(await show_job(call.env, job))


def rerun(call: RequestContext) -> Work:
    choice = choice_from(call)
    if call.is_dry_run:
        return partial(dry_run.rerun, call, choice, partial(_rerun, choice=choice))
    return partial(_rerun, call, choice)


async def _rerun(call: RequestContext, choice: RerunFilter, run_id: str) -> Response:
    # A filter by host reads every row of the previous run, so it counts as an audit.
    reads = call.api.requests.hold_audit(call.caller) if choice.hosts else nullcontext()
    key = RunKey(JobId(call.ids["job_id"]), RunId(run_id))
    find_begun = partial(call.env.store.read, key)
    async with call.api.storage.admit(call.caller, (Quota.LIVE_RUNS, *STORING), find_begun):
        with reads:
            started = await reruns.rerun(
                call.env,
                call.caller,
                call.ids["job_id"],
                retry=choice.retry,
                reasons=choice.reasons,
                hosts=choice.hosts,
                run_id=RunId(run_id),
            )
    body = RerunJobResponse(
        job_id=started.job.job_id,
        status=started.job.status,
        latest_run=await fresh_run_response(call.env, started.run, started.totals),
        rerun_of=started.rerun_of,
        retried_tasks=started.retried,
        inherited_tasks=started.inherited,
    )
    return json_reply(body, 202 if started.is_later else 201)


# Filters of a rerun: the query parameters select the tasks that start over (SPEC.md 4.18).


E = TypeVar("E", bound=StrEnum)


def choice_from(call: RequestContext) -> RerunFilter:
    return RerunFilter(
        retry=_members(call, "status", TaskStatus),
        reasons=_members(call, "reason", FailureReason),
        hosts=_hosts(call),
    )


def _members(call: RequestContext, name: str, kind: type[E]) -> frozenset[E] | None:
    texts = _texts(call, name)
    if texts is None:
        return None
    if not set(texts) <= set(kind):
        raise InvalidArgument(
            f"{name} must be a comma-separated list of {', '.join(kind)}.", pointer=f"/{name}"
        )
    return frozenset(kind(text) for text in texts)


def _hosts(call: RequestContext) -> frozenset[str] | None:
    """The hosts in the form of the URL parser, so that they compare equal to stored hosts."""
    texts = _texts(call, "host")
    if texts is None:
        return None
    hosts = [host_of(f"https://{text}/") if _is_bare(text) else None for text in texts]
    known = frozenset(host for host in hosts if host is not None)
    if None in hosts or len(known) > limits.RERUN_HOSTS_MAX:
        raise InvalidArgument(
            f"host must be a comma-separated list of up to {limits.RERUN_HOSTS_MAX} hosts.",
            pointer="/host",
        )
    return known


def _is_bare(text: str) -> bool:
    """Whether `text` is a host only, without a port or other parts of a URL.

    An IPv6 address is in brackets.
    """
    name = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text.replace(":", "/")
    return not set(name) & set("/?#@")


def _texts(call: RequestContext, name: str) -> list[str] | None:
    given = call.parameter(name)
    return None if given is None else [text.strip() for text in given.split(",")]
