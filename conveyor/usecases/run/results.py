"""Results: pages of tasks, their bodies and histories, and the links to them (docs/api.md,
Results)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from math import inf

import msgspec

from conveyor.domain import limits, queries
from conveyor.domain.errors import InvalidArgument, NotFound, TaskNotReady
from conveyor.domain.ids import CallerId, JobId, RunId, TaskId
from conveyor.domain.lifecycle import TASK_TERMINAL, TASK_UNFINISHED
from conveyor.domain.model import Job, Result, Run, Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_task, totals_of, visible_run
from conveyor.usecases.run import blob_download
from conveyor.usecases.run.blob_download import LetsIn, let_all_in, whole_body
from conveyor.usecases.run.retention import ResultExpiry, expiries_of, refuse_expired

FILTERS: dict[str, frozenset[TaskStatus] | None] = {
    "all": None,
    "successful": frozenset({TaskStatus.SUCCESSFUL}),
    "failed": frozenset({TaskStatus.FAILED}),
    "processing": TASK_UNFINISHED,
}


class ResultPage(msgspec.Struct, frozen=True):
    tasks: list[Task]
    next_cursor: str | None
    expiries: ResultExpiry


async def page(
    env: Context, job: Job, run: Run, *, status: str, cursor: str | None, limit: int
) -> ResultPage:
    """Returns one page of a run's tasks in id order; exact once the run has ended. It may be short
    if matching tasks are rare: only a missing cursor means that nothing is left."""
    if status not in FILTERS:
        raise InvalidArgument(f"status must be one of {', '.join(FILTERS)}.", pointer="/status")
    # The cursor's signature covers the scope, so a cursor works only for the list that issued it.
    scope = f"{job.caller}|{run.job_id}|{run.run_id}|{status}"
    after = None if cursor is None else await _position(env, run, cursor, scope)
    if await _is_none(env, run, status):
        return ResultPage([], None, await expiries_of(env, run))
    query = TasksOf(
        job_id=run.job_id,
        run_id=run.run_id,
        shard_count=run.shard_count,
        statuses=FILTERS[status],
        after=after,
        # One row more than the page shows whether another page follows.
        limit=limit + 1,
    )
    found = await env.store.page_tasks(query, read_max=limits.ROWS_READ_MAX)
    rows = found.tasks[:limit]
    until = rows[-1].task_id if len(found.tasks) > limit else found.until
    following = None
    if until is not None:
        sign = partial(env.secret_box.sign, purpose="cursor")
        following = queries.make_cursor(until, scope=scope, sign=sign)
    return ResultPage(rows, following, await expiries_of(env, run))


async def _is_none(env: Context, run: Run, status: str) -> bool:
    """Returns whether the counters show no such task. Then the rows need not be read."""
    if FILTERS[status] is None:
        return False
    totals = await totals_of(env, run)
    unfinished = totals.admitted - totals.done
    counts = {"successful": totals.successful, "failed": totals.failed, "processing": unfinished}
    return counts[status] == 0


async def _position(env: Context, run: Run, cursor: str, scope: str) -> TaskId:
    """Reads a signed cursor, or the plain id of a task of this run, which older clients stored."""
    sign = partial(env.secret_box.sign, purpose="cursor")
    try:
        return TaskId(queries.read_cursor(cursor, scope=scope, sign=sign))
    except InvalidArgument:
        try:
            return (await load_task(env, run, cursor)).task_id
        except NotFound:
            pass
        raise


async def ended_task(env: Context, run: Run, task_id: str) -> tuple[Task, float]:
    """Returns the task, and the instant until which its body may be read. Raises TaskNotReady if it
    has not ended."""
    task = await load_task(env, run, task_id)
    if task.status not in TASK_TERMINAL:
        raise TaskNotReady("The task has not ended yet.")
    if task.result is None:
        return task, inf
    expiries = await expiries_of(env, run)
    refuse_expired(expiries, task)
    return task, expiries.instant_of(task)


async def body_of(env: Context, result: Result) -> AsyncGenerator[bytes, None]:
    """Opens the body, checked: before the response if it is short, at the end if it is long."""
    return await whole_body(
        env,
        result.key,
        size_bytes=result.size_bytes,
        sha256=result.sha256,
        absent="The body of this task is no longer stored.",
    )


def link_token(env: Context, run: Run, task: Task) -> str:
    """Makes the token with which the URL of a body works without an API key for
    RESULT_URL_TTL_S."""
    what = _linked(run.job_id, run.run_id, task.task_id)
    return blob_download.make_token(
        env, what, purpose="result", until=env.now() + limits.RESULT_URL_TTL_S
    )


async def run_by_link(
    env: Context,
    job_id: str,
    run_id: str,
    task_id: str,
    token: str,
    *,
    lets_in: LetsIn = let_all_in,
) -> tuple[Job, Run]:
    """Returns the run of a signed link. Raises NotFound if the token is not valid or the caller's
    key is not accepted any more."""
    absent = "There is no such task."
    what = _linked(job_id, run_id, task_id)
    # Before any read: a request without a valid token costs no call to the store.
    blob_download.check_token(env, token, what, purpose="result", absent=absent)
    job, run = await visible_run(env, JobId(job_id), RunId(run_id), absent=absent)
    if not lets_in(run.caller):
        raise NotFound(absent)
    return job, run


def _linked(job_id: str, run_id: str, task_id: str) -> str:
    return f"{job_id}/{run_id}/{task_id}"


def owner_scope(caller: CallerId, what: str) -> str:
    """Returns the scope of the cursors of a caller's own lists."""
    return f"{caller}|{what}"
