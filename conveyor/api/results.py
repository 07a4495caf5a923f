"""Results over HTTP: pages of tasks, their bodies, their histories (docs/api.md, Results)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from conveyor.api.route import CURSOR, Access, Example, Parameter, Query, Route
from conveyor.api.server.problem import MEDIA_TYPE
from conveyor.api.server.request import Download, RequestContext, Response, json_reply
from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument, NotFound, ResultDamaged
from conveyor.domain.model import FailureReason, Job, Result, Run, Task
from conveyor.domain.queries import TasksOf
from conveyor.domain.submit.scraper_params import content_type_for, extension_for
from conveyor.schemas.responses import (
    HostResponse,
    ListHostsResponse,
    ListResultsResponse,
    TaskHistoryResponse,
    TaskResult,
)
from conveyor.schemas.views import history_view, result_view
from conveyor.usecases.lookup import (
    load_owned_job,
    load_owned_job_and_run,
    load_owned_run,
    load_task,
    require_run,
)
from conveyor.usecases.run import results
from conveyor.usecases.run.results import HostFigures, TaskFilter, sum_hosts

log = logging.getLogger(__name__)


def _filter_from(call: RequestContext) -> TaskFilter:
    reason, host, text = (call.parameter(name) for name in ("reason", "host", "text"))
    order = call.parameter("order")
    if reason is not None and reason not in set(FailureReason):
        raise InvalidArgument(
            f"reason must be one of {', '.join(FailureReason)}.", pointer="/reason"
        )
    if order not in {None, "id", "list"}:
        raise InvalidArgument("order must be id or list.", pointer="/order")
    return TaskFilter(
        reason=None if reason is None else FailureReason(reason),
        host=None if host is None else host.lower(),
        text=None if text is None else text.lower(),
        in_list_order=order == "list",
    )


def _host_view(figures: HostFigures) -> HostResponse:
    return HostResponse(
        host=figures.host,
        total=figures.total,
        successful=figures.successful,
        failed=figures.failed,
        inflight=figures.inflight,
        bytes=figures.bytes,
        credits=figures.credits,
        failure_reasons=dict(figures.reasons),
        median_s=None if figures.median_s is None else round(figures.median_s, 3),
    )


async def list_results(call: RequestContext) -> Response:
    limit = call.limit(default=limits.PAGE_ROWS, limit_max=limits.PAGE_ROWS_MAX)
    job, run = await _run_of(call)
    task_filter = _filter_from(call)
    async with call.api.requests.turn_to_page(call.caller):
        page = await results.page(
            call.env,
            job,
            run,
            status=_default(call.parameter("status"), "all"),
            cursor=call.parameter("cursor"),
            limit=limit,
            task_filter=task_filter,
        )
    views = [
        result_view(job, task, _link_to(call, run, task), is_expired=page.expiries.is_over(task))
        for task in page.tasks
    ]
    return json_reply(ListResultsResponse(views, page.next_cursor))


async def get_task(call: RequestContext) -> Response:
    job, run = await _run_of(call)
    task = await load_task(call.env, run, call.ids["task_id"])
    expiries = await results.expiries_of(call.env, run)
    link = _link_to(call, run, task)
    return json_reply(result_view(job, task, link, is_expired=expiries.is_over(task)))


async def list_hosts(call: RequestContext) -> Response:
    """Reads many rows of the run, so it counts as an audit."""
    _, run = await _run_of(call)
    query = TasksOf(
        job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=limits.PAGE_ROWS
    )
    with call.api.requests.hold_audit(call.caller):
        figures, is_complete = await sum_hosts(call.env, query)
    views = [_host_view(host) for host in figures]
    return json_reply(ListHostsResponse(views, is_complete))


async def get_history(call: RequestContext) -> Response:
    _, run = await _run_of(call)
    return json_reply(history_view(await load_task(call.env, run, call.ids["task_id"])))


async def get_content(call: RequestContext) -> Response | Download:
    token = call.parameter("token")
    job, run = await (_run_of(call) if token is None else _run_by_link(call, token))
    task, until = await results.ended_task(call.env, run, call.ids["task_id"])
    if task.result is None:
        return Response(422, msgspec.json.encode(task.problem), MEDIA_TYPE)
    content_type = content_type_for(job.format, task.result)
    name = f"{task.task_id}.{extension_for(content_type)}"
    direct = await direct_reply(
        call, task.result.key, content_type=content_type, name=name, until=until
    )
    if direct is not None:
        return direct
    fields = {"job": run.job_id, "run": run.run_id, "task": task.task_id, "blob": task.result.key}
    with logging_damage(fields):
        pieces = await results.body_of(call.env, task.result)
    return Download(
        log_damage_while_sending(pieces, fields), body_headers(task.result, content_type, name)
    )


async def _run_of(call: RequestContext) -> tuple[Job, Run]:
    """Returns the run of the path, or the latest run of the job."""
    run_id = call.ids.get("run_id")
    if run_id is None:
        job, run, _ = await load_owned_job_and_run(call.env, call.caller, call.ids["job_id"])
        return job, require_run(run)
    job = await load_owned_job(call.env, call.caller, call.ids["job_id"])
    return job, await load_owned_run(call.env, job, run_id)


async def _run_by_link(call: RequestContext, token: str) -> tuple[Job, Run]:
    ids = call.ids
    return await results.run_by_link(
        call.env, ids["job_id"], ids["run_id"], ids["task_id"], token, lets_in=call.api.auth.lets_in
    )


def _default(value: str | None, default: str) -> str:
    return default if value is None else value


def _link_to(call: RequestContext, run: Run, task: Task) -> str | None:
    if task.result is None:
        return None
    path = f"/v1/jobs/{run.job_id}/runs/{run.run_id}/tasks/{task.task_id}/content"
    return f"{call.base_url}{path}?token={results.link_token(call.env, run, task)}"


def body_headers(result: Result, content_type: str, name: str) -> dict[str, str]:
    """Headers that make a browser save the body of a foreign site and never run it as a page of
    this server.
    """
    return {
        "Content-Type": content_type,
        "Content-Length": str(result.size_bytes),
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "ETag": f'"{result.sha256}"',
    }


# Redirects to the storage. Each request gets a new signed URL, and only if it asks for a redirect:
# clients of the contract do not follow redirects and would save the empty body
# (docs/api.md, Results).


async def direct_reply(
    call: RequestContext, key: str, *, content_type: str, name: str, until: float
) -> Response | None:
    """A 302 to the storage URL, valid at most until `until`; None if the API must stream the
    body itself.
    """
    if not call.flag("redirect"):
        return None
    address = await call.env.blobs.download_url(
        key,
        content_type=content_type,
        filename=name,
        expires_at=min(call.env.now() + limits.DIRECT_URL_TTL_S, until),
    )
    return None if address is None else Response(302, headers={"Location": address})


# Damaged stored bodies are logged, at whatever point of a download they are found
# (docs/storage.md, Damaged bodies).


@contextmanager
def logging_damage(what: Mapping[str, str]) -> Iterator[None]:
    """Logs a damaged or missing body. `what` has its ids and key, and no content."""
    try:
        yield
    except ResultDamaged as error:
        _log(logging.ERROR, "a stored body is damaged", what, error)
        raise
    except NotFound as error:
        _log(logging.WARNING, "a stored body is missing", what, error)
        raise


async def log_damage_while_sending(
    pieces: AsyncGenerator[bytes, None], fields: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """As `logging_damage`, for a body that is being sent. The error aborts the connection, so that
    the client sees an incomplete body."""
    try:
        with logging_damage(fields):
            async for piece in pieces:
                yield piece
    finally:
        await pieces.aclose()


def _log(level: int, message: str, what: Mapping[str, str], error: Exception) -> None:
    log.log(level, message, extra={**what, "cause": str(error)})


TASK_FILTERS = (
    Parameter(
        "reason",
        {"type": "string", "enum": list(FailureReason)},
        "Only tasks that failed for this reason. With this or the next filters a page may be "
        "short; only a missing `next_cursor` means that nothing is left.",
    ),
    Parameter("host", {"type": "string"}, "Only tasks of this host."),
    Parameter("text", {"type": "string"}, "Only tasks whose URL contains this text."),
    Parameter(
        "order",
        {"type": "string", "enum": ["id", "list"], "default": "id"},
        f"`list`: in the order of the submitted list; for up to {limits.ORDERED_ROWS_MAX:,} tasks.",
    ),
)
ROWS = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": limits.PAGE_ROWS_MAX, "default": limits.PAGE_ROWS},
    "The largest number of rows in the response.",
)
RESULT_STATUS = Parameter(
    "status",
    {"type": "string", "enum": list(results.FILTERS), "default": "all"},
    "Only tasks like these; `processing` are all that have not ended, `inflight` those that are "
    "being fetched.",
)
TOKEN = Parameter("token", {"type": "string"}, "From a `result_url`; replaces the API key.")
REDIRECT = Parameter(
    "redirect",
    {"type": "boolean", "default": False},
    "Redirect to the storage, if the storage can serve the body itself.",
)

_JOB = "/v1/jobs/{job_id}"
_RUN = _JOB + "/runs/{run_id}"

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path=_JOB + "/results",
        name="listLatestRunResults",
        tag="tasks",
        summary="Page through the tasks of the latest run",
        description=(
            "Lists the tasks of the latest run, with a link to the body of each successful one. A "
            "page may be short: only a null `next_cursor` means that nothing is left."
        ),
        example=Example(query={"status": "successful", "limit": "10"}),
        does=Query(list_results),
        answers={200: ListResultsResponse},
        query=(RESULT_STATUS, *TASK_FILTERS, ROWS, CURSOR),
        gives={"task_id": "/results/0/task_id"},
    ),
    Route(
        method="GET",
        path=_RUN + "/results",
        name="listRunResults",
        tag="tasks",
        summary="Page through the tasks of a run",
        description=(
            "Lists the tasks of a run, with a link to the body of each successful one. A page may "
            "be short: only a null `next_cursor` means that nothing is left."
        ),
        example=Example(query={"status": "all", "order": "list"}),
        does=Query(list_results),
        answers={200: ListResultsResponse},
        query=(RESULT_STATUS, *TASK_FILTERS, ROWS, CURSOR),
        gives={"task_id": "/results/0/task_id"},
    ),
    Route(
        method="GET",
        path=_RUN + "/hosts",
        name="listRunHosts",
        tag="runs",
        summary="Show the figures of each host of a run",
        description=(
            "Counts the tasks of each host of a run: outcomes, failure reasons, bytes and the "
            "median duration. The operation reads the rows of the run and counts as an audit."
        ),
        does=Query(list_hosts),
        answers={200: ListHostsResponse},
        problems=(503,),
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}",
        name="getRunTask",
        tag="tasks",
        summary="Show a task",
        description="Shows one task: its state, its last problem and its charge.",
        does=Query(get_task),
        answers={200: TaskResult},
    ),
    Route(
        method="GET",
        path=_JOB + "/tasks/{task_id}/content",
        name="getLatestRunTaskContent",
        tag="tasks",
        summary="Fetch the body of a task of the latest run",
        description=(
            "Returns the stored body of a task of the latest run as it was fetched, as an "
            "attachment. A failed task answers 422 with its problem."
        ),
        does=Query(get_content),
        answers={200: "*/*", 302: None},
        problems=(409, 410, 422),
        query=(REDIRECT,),
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}/content",
        name="getRunTaskContent",
        tag="tasks",
        summary="Fetch the body of a task",
        description=(
            "Returns the stored body of a task as it was fetched, as an attachment. A failed task "
            "answers 422 with its problem. With the token of a `result_url` no API key is needed."
        ),
        does=Query(get_content),
        answers={200: "*/*", 302: None},
        problems=(409, 410, 422),
        query=(TOKEN, REDIRECT),
        access=Access.LINK,
    ),
    Route(
        method="GET",
        path=_JOB + "/tasks/{task_id}/history",
        name="getLatestRunTaskHistory",
        tag="tasks",
        summary="Show every attempt at a task of the latest run",
        description=(
            "Lists the attempts at a task of the latest run, with their times, charges and "
            "problems."
        ),
        does=Query(get_history),
        answers={200: TaskHistoryResponse},
    ),
    Route(
        method="GET",
        path=_RUN + "/tasks/{task_id}/history",
        name="getRunTaskHistory",
        tag="tasks",
        summary="Show every attempt at a task",
        description="Lists the attempts at a task, with their times, charges and problems.",
        does=Query(get_history),
        answers={200: TaskHistoryResponse},
    ),
)
