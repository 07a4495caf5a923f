"""Results over HTTP: pages of tasks, their bodies, their histories (SPEC 4.5)."""

from __future__ import annotations

import re

import msgspec

from conveyor.api.call import Call, Download, Reply, json_reply
from conveyor.api.problems import MEDIA_TYPE
from conveyor.domain import limits
from conveyor.domain.model import Format, Job, Result, Run, Task
from conveyor.domain.params import content_type_of
from conveyor.usecases import results
from conveyor.usecases.lookups import need_latest_run, own_job, own_run, task_of
from conveyor.usecases.results import Body
from conveyor.wire.responses import ListResultsResponse
from conveyor.wire.views import history_view, result_view

_CONTENT_TYPE = re.compile(
    r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:\s*;\s*[A-Za-z0-9!#$&^_.+-]+=[\x20-\x7e]{1,80})?\Z"
)
_EXTENSIONS = {
    "application/json": "json",
    "application/pdf": "pdf",
    "image/gif": "gif",
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/svg+xml": "svg",
    "image/webp": "webp",
    "text/csv": "csv",
    "text/html": "html",
    "text/markdown": "md",
    "text/plain": "txt",
    "text/xml": "xml",
    "application/xml": "xml",
}


async def list_results(call: Call) -> Reply:
    limit = call.limit(default=limits.PAGE_ROWS, limit_max=limits.PAGE_ROWS_MAX)
    job, run = await _run_of(call)
    page = await results.page(
        call.env,
        job,
        run,
        status=_given(call.parameter("status"), "all"),
        cursor=call.parameter("cursor"),
        limit=limit,
    )
    shown = [result_view(job, task, _link_to(call, run, task)) for task in page.tasks]
    return json_reply(ListResultsResponse(shown, page.next_cursor))


async def get_history(call: Call) -> Reply:
    _, run = await _run_of(call)
    return json_reply(history_view(await task_of(call.env, run, call.ids["task_id"])))


async def get_content(call: Call) -> Reply | Download:
    token = call.parameter("token")
    job, run = await (_run_of(call) if token is None else _run_by_link(call, token))
    task, body = await results.body_of(call.env, run, call.ids["task_id"])
    if body is None:
        return Reply(422, msgspec.json.encode(task.problem), MEDIA_TYPE)
    return Download(body.pieces, _headers_of(job, task, body))


async def _run_of(call: Call) -> tuple[Job, Run]:
    """The run that the address names, or the job's latest."""
    job = await own_job(call.env, call.caller, call.ids["job_id"])
    run_id = call.ids.get("run_id")
    if run_id is None:
        return job, await need_latest_run(call.env, job)
    return job, await own_run(call.env, job, run_id)


async def _run_by_link(call: Call, token: str) -> tuple[Job, Run]:
    ids = call.ids
    return await results.run_by_link(call.env, ids["job_id"], ids["run_id"], ids["task_id"], token)


def _given(value: str | None, default: str) -> str:
    return default if value is None else value


def _link_to(call: Call, run: Run, task: Task) -> str | None:
    if task.result is None:
        return None
    path = f"/v1/jobs/{run.job_id}/runs/{run.run_id}/tasks/{task.task_id}/content"
    return f"{call.base_url}{path}?token={results.link_token(call.env, run, task)}"


def _headers_of(job: Job, task: Task, body: Body) -> dict[str, str]:
    """Whatever a site answered is data to be saved: no browser may run it as our page."""
    content_type = content_type_for(job.format, body.result)
    extension = _EXTENSIONS.get(content_type.partition(";")[0].strip().lower(), "bin")
    return {
        "Content-Type": content_type,
        "Content-Length": str(body.result.size_bytes),
        "Content-Disposition": f'attachment; filename="{task.task_id}.{extension}"',
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "ETag": f'"{body.result.sha256}"',
    }


def content_type_for(body_format: Format, result: Result) -> str:
    """The format's own type. A page that turned out to be something else keeps what it said."""
    stored = result.content_type.strip()
    says_more = stored.lower() != "text/html" and _CONTENT_TYPE.match(stored) is not None
    if body_format is Format.HTML and says_more:
        return stored
    return content_type_of(body_format)
