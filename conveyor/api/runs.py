"""Runs over HTTP: list, show, stop, pause, resume, rerun, audit, delete (SPEC.md 3)."""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from typing import TypeVar

import msgspec

from conveyor.api import dry_run
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
from conveyor.api.server.request import RequestContext, Response, Work, json_reply
from conveyor.domain import limits, queries
from conveyor.domain.changes import RunKey
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.domain.model import FailureReason, PauseState, TaskStatus
from conveyor.domain.queries import RunsOf
from conveyor.domain.quota import Quota
from conveyor.domain.submit.target import host_of
from conveyor.schemas.responses import (
    AuditResponse,
    ListFetchesResponse,
    ListJobRunsResponse,
    ReceiptResponse,
    RerunDryRunResponse,
    RerunJobResponse,
    RunResponse,
    SeriesResponse,
)
from conveyor.schemas.views import bucket_view, fetch_view, run_view
from conveyor.usecases.lookup import load_owned_job, load_owned_run
from conveyor.usecases.run import audit, run_progress, runs
from conveyor.usecases.run import rerun as reruns
from conveyor.usecases.run.rerun import RerunFilter
from conveyor.usecases.run.results import owner_scope

# The quotas of every request that stores tasks.
STORAGE_QUOTAS = (Quota.STORED_TASKS, Quota.STORED_BYTES)


async def list_runs(call: RequestContext) -> Response:
    env = call.env
    limit = call.limit(default=limits.LIST_ROWS, limit_max=limits.LIST_ROWS_MAX)
    job = await load_owned_job(env, call.caller, call.ids["job_id"])
    scope = owner_scope(call.caller, f"runs|{job.job_id}")
    sign = partial(env.secret_box.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    before = None if cursor is None else int(queries.read_cursor(cursor, scope=scope, sign=sign))
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, before=before, limit=limit + 1)
    rows = await env.store.find(query)
    views = [run_view(await run_progress.cached_overview(env, job, run)) for run in rows[:limit]]
    if len(rows) <= limit:
        return json_reply(ListJobRunsResponse(views, None))
    next_cursor = queries.make_cursor(str(rows[limit - 1].sequence), scope=scope, sign=sign)
    return json_reply(ListJobRunsResponse(views, next_cursor))


async def get_run(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    run = await load_owned_run(call.env, job, call.ids["run_id"])
    return json_reply(run_view(await run_progress.cached_overview(call.env, job, run)))


async def stop(call: RequestContext, _: str) -> Response:
    stopped = await runs.stop(call.env, call.caller, call.ids["job_id"])
    leases = await runs.count_leases(call.env, stopped.run)
    receipt = ReceiptResponse(
        complete=stopped.receipt.complete,
        # No lease is no proof that no task runs. Only a complete receipt proves it.
        inflight=0 if stopped.receipt.complete else leases or None,
        leases=leases,
        released=stopped.receipt.released,
        abandoned=stopped.receipt.abandoned,
    )
    overview = await run_progress.fresh_overview(call.env, stopped.run, stopped.totals)
    return json_reply(msgspec.structs.replace(run_view(overview), receipt=receipt))


async def pause(call: RequestContext, _: str) -> Response:
    return await _set_pause(call, PauseState.PAUSED)


async def resume(call: RequestContext, _: str) -> Response:
    return await _set_pause(call, PauseState.ACTIVE)


async def _set_pause(call: RequestContext, state: PauseState) -> Response:
    run = await runs.set_pause(call.env, call.caller, call.ids["job_id"], state)
    return json_reply(run_view(await run_progress.fresh_overview(call.env, run)))


async def delete_run(call: RequestContext, _: str) -> Response:
    await runs.delete_run(call.env, call.caller, call.ids["job_id"], call.ids["run_id"])
    return Response(202)


# The series and the longest fetches of a run over HTTP (docs/api.md, Series).


async def get_series(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    run = await load_owned_run(call.env, job, call.ids["run_id"])
    totals = await run_progress.cached_totals(call.env, run)
    buckets = await run_progress.load_series(call.env, run, totals)
    return json_reply(SeriesResponse([bucket_view(bucket) for bucket in buckets]))


async def list_fetches(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    run = await load_owned_run(call.env, job, call.ids["run_id"])
    tasks = await run_progress.longest_fetches(call.env, run)
    now = call.env.now()
    return json_reply(ListFetchesResponse([fetch_view(task, now) for task in tasks]))


# Audits over HTTP (docs/api.md, Audit).


async def get_audit(call: RequestContext) -> Response:
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    run = await load_owned_run(call.env, job, call.ids["run_id"])
    with call.api.requests.hold_audit(call.caller):
        findings = await audit.audit(call.env, run)
    body = AuditResponse(
        job_id=run.job_id,
        run_id=run.run_id,
        ok=findings.is_ok,
        live=findings.is_live,
        counts=findings.counts,
        differences=findings.differences,
        bodies_checked=findings.bodies,
        bad_bodies=findings.bad_bodies,
    )
    return json_reply(body)


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
    async with call.api.storage.admit(call.caller, (Quota.LIVE_RUNS, *STORAGE_QUOTAS), find_begun):
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
    overview = await run_progress.fresh_overview(call.env, started.run, started.totals)
    body = RerunJobResponse(
        job_id=started.job.job_id,
        status=started.job.status,
        latest_run=run_view(overview),
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
    value = call.parameter(name)
    return None if value is None else [text.strip() for text in value.split(",")]


_STATUSES = "|".join(TaskStatus)
RETRY = Parameter(
    "status",
    {"type": "string", "pattern": rf"^({_STATUSES})(,({_STATUSES}))*$"},
    f"Repeat only tasks with these statuses, and inherit the others: a comma-separated list of "
    f"{', '.join(TaskStatus)}.",
)
REASON = Parameter(
    "reason",
    {"type": "string"},
    "Of those, only tasks that failed for one of these reasons: a comma-separated list of "
    f"{', '.join(FailureReason)}.",
)
HOST = Parameter(
    "host", {"type": "string"}, "Of those, only tasks of these hosts, separated by commas."
)

_JOB = "/v1/jobs/{job_id}"
_RUN = _JOB + "/runs/{run_id}"

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path=_JOB + "/stop",
        name="stopJob",
        tag="jobs",
        summary="Stop the latest run, with a receipt for the released tasks",
        description=(
            "Ends the latest run for good. The receipt says what was released, and whether any "
            "fetch is still open. Tasks that have not ended stay as they are."
        ),
        does=Command(make_handler(stop)),
        answers={200: RunResponse},
    ),
    Route(
        method="POST",
        path=_JOB + "/cancel",
        name="cancelJob",
        tag="jobs",
        summary="Another name for stop",
        description="Does the same as `stopJob`, under the name that older clients use.",
        does=Command(make_handler(stop)),
        answers={200: RunResponse},
    ),
    Route(
        method="POST",
        path=_JOB + "/pause",
        name="pauseJob",
        tag="jobs",
        summary="Pause the latest run",
        description="Pauses the latest run: no further task is started. Tasks in flight may end.",
        does=Command(make_handler(pause)),
        answers={200: RunResponse},
    ),
    Route(
        method="POST",
        path=_JOB + "/resume",
        name="resumeJob",
        tag="jobs",
        summary="Resume a paused run",
        description="Resumes the latest run after a pause.",
        does=Command(make_handler(resume)),
        answers={200: RunResponse},
    ),
    Route(
        method="POST",
        path=_JOB + "/rerun",
        name="rerunJob",
        tag="jobs",
        summary="Run a job again, all of it or part of it",
        description=(
            "Creates a run over the tasks of the latest run. Without a filter every task starts "
            "over. With filters, the tasks that match all of them start over, and the others are "
            "inherited with their results."
        ),
        example=Example(query={"status": "failed"}, status=201),
        does=Command(rerun),
        answers={
            200: RerunDryRunResponse,
            201: RerunJobResponse,
            202: RerunJobResponse,
        },
        query=(RETRY, REASON, HOST, DRY_RUN),
        gives={"run_id": "/latest_run/run_id"},
    ),
    Route(
        method="GET",
        path=_JOB + "/runs",
        name="listJobRuns",
        tag="runs",
        summary="List the runs of a job, newest first",
        description="Lists the runs of a job, newest first.",
        example=Example(query={"limit": "10"}),
        does=Query(list_runs),
        answers={200: ListJobRunsResponse},
        query=(LIMIT, CURSOR),
    ),
    Route(
        method="GET",
        path=_RUN,
        name="getJobRun",
        tag="runs",
        summary="Show a run",
        description="Shows the counts, the rate and the wait reason of a run.",
        does=Query(get_run),
        answers={200: RunResponse},
    ),
    Route(
        method="DELETE",
        path=_RUN,
        name="deleteJobRun",
        tag="runs",
        summary="Delete a run and its results",
        description=(
            "Deletes an ended run and its results. A run whose results or list another run needs "
            "is kept (409)."
        ),
        does=Command(make_handler(delete_run)),
        answers={202: None},
        problems=(409,),
    ),
    Route(
        method="GET",
        path=_RUN + "/series",
        name="getJobRunSeries",
        tag="runs",
        summary="Show what ended in each minute of a run",
        description=(
            "Returns the tasks that ended, the bytes that were stored and the charges, in buckets "
            "of about a minute from the start of the run to its end or to now. The sum of the "
            "buckets is what the run's `stats` show. Buckets are longer in a run of many hours, "
            "and where little ended."
        ),
        does=Query(get_series),
        answers={200: SeriesResponse},
    ),
    Route(
        method="GET",
        path=_RUN + "/fetches",
        name="listJobRunFetches",
        tag="runs",
        summary="Show the longest fetches of a run that are under way",
        description=(
            f"Returns up to {limits.OLDEST_FETCHES} tasks that workers are fetching, the oldest "
            f"first, with their age. In a run of more than {limits.ROWS_READ_MAX:,} tasks these "
            "are fetches of 2 s or more, as workers reported them within the last 10 s."
        ),
        does=Query(list_fetches),
        answers={200: ListFetchesResponse},
    ),
    Route(
        method="GET",
        path=_RUN + "/audit",
        name="auditJobRun",
        tag="runs",
        summary="Count a run again from its rows, and check some of its bodies",
        description=(
            "Reads every row of a run, counts it again and compares the result with the counters. "
            "It also reads a sample of the stored bodies and compares their digests. The request "
            "lasts as long as the recount."
        ),
        does=Query(get_audit),
        answers={200: AuditResponse},
        problems=(503,),
    ),
)
