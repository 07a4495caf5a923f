"""Jobs over HTTP: submit, list, show, feed, close, rerun, delete
(docs/api.md, Submitting lists)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NoReturn

from conveyor.api import dry_runs, schedules
from conveyor.api.call import Call, Reply, Work, json_reply
from conveyor.api.filters import choice_from
from conveyor.api.runs import show_run
from conveyor.api.schedules import glance_at_job, show_job
from conveyor.api.webhooks import webhook_from
from conveyor.domain import limits, paging, submission
from conveyor.domain.budget import BudgetCap
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import BatchId, JobId, RunId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import JobStatus, JobType, Webhook
from conveyor.domain.params import InvalidParam, Params, check_params
from conveyor.domain.queries import JobsOf
from conveyor.domain.quotas import Quota
from conveyor.domain.submission import Refusal, TaskDraft
from conveyor.usecases import budgets, jobs, open_jobs, reruns, webhooks
from conveyor.usecases.choosing import Choice
from conveyor.usecases.env import Env
from conveyor.usecases.jobs import Submission
from conveyor.usecases.long_lists import LongList
from conveyor.usecases.lookups import own_job
from conveyor.usecases.results import owner_scope
from conveyor.usecases.staging import OnInvalid
from conveyor.wire.limits import cap_from, host_limits_from
from conveyor.wire.requests import (
    AddTasksRequest,
    SubmitJobRequest,
    WebhookInput,
    decode_add_tasks,
    decode_budget,
    decode_submit,
    drafts_of,
    escape_pointer,
)
from conveyor.wire.responses import (
    AddTasksResponse,
    ListJobsResponse,
    RerunJobResponse,
    SubmitJobResponse,
)
from conveyor.wire.views import webhook_view

# What every request that brings tasks adds to.
STORING = (Quota.STORED_TASKS, Quota.STORED_BYTES)


def submit(call: Call) -> Work:
    request = decode_submit(call.body)
    asked = submission_from(call, request)
    if call.is_dry_run:
        return partial(dry_runs.submit, call, asked, partial(work_of, request=request, asked=asked))
    return work_of(call, request, asked)


def work_of(call: Call, request: SubmitJobRequest, asked: Submission) -> Work:
    if JobType(request.type) is JobType.SCHEDULED:
        return schedules.submit(call, request.schedule, asked)
    return partial(_submit, call, asked)


async def _submit(call: Call, asked: Submission, job_id: str) -> Reply:
    if asked.webhook is not None:
        await webhooks.check_for_new_job(
            call.env, call.api.notifier, call.caller, asked.webhook, JobId(job_id)
        )
    opened = (Quota.OPEN_JOBS,) if asked.is_open else ()
    brought = None if asked.input_id is not None else call.sent.size_bytes
    stored = (Quota.LIVE_RUNS, *opened, *STORING)
    find_begun = partial(call.env.store.read, JobKey(JobId(job_id)))
    async with call.api.storage.admit(call.caller, stored, find_begun, bytes_sent=brought):
        accepted = await jobs.submit(call.env, call.caller, asked, job_id=JobId(job_id))
    body = SubmitJobResponse(
        job_id=accepted.job.job_id,
        status=accepted.job.status,
        accepted_tasks=accepted.accepted,
        latest_run=await show_run(call.env, accepted.run, accepted.totals),
        webhook=webhook_view(accepted.job.webhook),
    )
    return json_reply(body, 202 if accepted.is_later else 201)


def submission_from(call: Call, request: SubmitJobRequest) -> Submission:
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


def _task_token_from(env: Env, request: SubmitJobRequest) -> str | None:
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
        return submission.check_metadata(request.metadata)
    except Refusal as refusal:
        raise InvalidArgument(
            f"metadata holds up to {limits.METADATA_KEYS_MAX} texts of up to "
            f"{limits.METADATA_VALUE_CHARS_MAX} characters under printable names.",
            pointer="/metadata",
            code=refusal.reason,
        ) from None


def _webhook_from(env: Env, given: WebhookInput | None) -> Webhook | None:
    return None if given is None else webhook_from(env, given, pointer="/webhook")


async def list_jobs(call: Call) -> Reply:
    status, kind = call.parameter("status"), call.parameter("type")
    limit = call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX)
    statuses = JOB_VISIBLE if status is None else JOB_VISIBLE & {_job_status_from(status)}
    if kind is not None and kind not in set(JobType):
        raise InvalidArgument(f"type must be one of {', '.join(JobType)}.", pointer="/type")
    external_id = call.parameter("external_id")
    named = "" if external_id is None else f"|{external_id}"
    scope = owner_scope(call.caller, f"jobs|{status}|{kind}{named}")
    sign = partial(call.env.vault.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    before = None if cursor is None else paging.read_cursor(cursor, scope=scope, sign=sign)
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
    rows = await call.env.store.find(query)
    shown = [await glance_at_job(call.env, job) for job in rows[:limit]]
    more = len(rows) > limit
    following = paging.make_cursor(rows[limit - 1].job_id, scope=scope, sign=sign) if more else None
    return json_reply(ListJobsResponse(shown, following))


def _job_status_from(text: str) -> JobStatus:
    if text not in set(JobStatus):
        raise InvalidArgument(f"status must be one of {', '.join(JobStatus)}.", pointer="/status")
    return JobStatus(text)


async def get_job(call: Call) -> Reply:
    job = await own_job(call.env, call.caller, call.ids["job_id"])
    return json_reply(await glance_at_job(call.env, job))


def delete_job(call: Call) -> Work:
    return partial(_delete_job, call)


async def _delete_job(call: Call, _: str) -> Reply:
    await jobs.delete(call.env, call.caller, call.ids["job_id"])
    return Reply(202)


def add_tasks(call: Call) -> Work:
    request = decode_add_tasks(call.body)
    return partial(feed, call, request, drafts_of(request.tasks))


async def feed(
    call: Call, request: AddTasksRequest, drafts: Sequence[TaskDraft] | LongList, batch_id: str
) -> Reply:
    sent = call.sent.size_bytes
    if not isinstance(drafts, LongList):
        job_id = call.ids["job_id"]
        await open_jobs.refuse_growth(call.env, call.caller, job_id, drafts, bytes_sent=sent)
    find_begun = partial(
        open_jobs.find_batch, call.env, call.caller, call.ids["job_id"], BatchId(batch_id)
    )
    async with call.api.storage.admit(call.caller, STORING, find_begun, bytes_sent=sent):
        accepted = await open_jobs.add_tasks(
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
        latest_run=await show_run(call.env, accepted.run, accepted.totals),
    )
    return json_reply(body)


def close(call: Call) -> Work:
    return partial(_close, call)


async def _close(call: Call, _: str) -> Reply:
    job = await open_jobs.close(call.env, call.caller, call.ids["job_id"])
    return json_reply(await show_job(call.env, job))


def set_budget(call: Call) -> Work:
    cap = cap_from(decode_budget(call.body), at="")
    return partial(_set_budget, call, cap)


async def _set_budget(call: Call, cap: BudgetCap, _: str) -> Reply:
    job = await budgets.set_cap(call.env, call.caller, call.ids["job_id"], cap)
    return json_reply(await show_job(call.env, job))


def rerun(call: Call) -> Work:
    choice = choice_from(call)
    if call.is_dry_run:
        return partial(dry_runs.rerun, call, choice, partial(_rerun, choice=choice))
    return partial(_rerun, call, choice)


async def _rerun(call: Call, choice: Choice, run_id: str) -> Reply:
    # A filter by host reads every row of the run before, like an audit.
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
        latest_run=await show_run(call.env, started.run, started.totals),
        rerun_of=started.rerun_of,
        retried_tasks=started.retried,
        inherited_tasks=started.inherited,
    )
    return json_reply(body, 202 if started.is_later else 201)
