"""Results: pages of tasks, their bodies and their histories, and the links to them (SPEC 4.5)."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from conveyor.domain import limits, paging
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import InvalidArgument, NotFound, TaskNotReady
from conveyor.domain.ids import CallerId, JobId, RunId, TaskId
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE, TASK_TERMINAL, TASK_UNFINISHED
from conveyor.domain.model import Job, Result, Run, Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.ports.errors import BlobMissing
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import task_of

FILTERS: dict[str, frozenset[TaskStatus] | None] = {
    "all": None,
    "successful": frozenset({TaskStatus.SUCCESSFUL}),
    "failed": frozenset({TaskStatus.FAILED}),
    "processing": TASK_UNFINISHED,
}


class ResultPage(msgspec.Struct, frozen=True):
    tasks: list[Task]
    next_cursor: str | None


class Body(msgspec.Struct, frozen=True):
    """A stored body, ready to be streamed."""

    result: Result
    pieces: AsyncGenerator[bytes, None]


async def page(
    env: Env, job: Job, run: Run, *, status: str, cursor: str | None, limit: int
) -> ResultPage:
    """One page of a run's tasks in id order; exact once the run has ended."""
    if status not in FILTERS:
        raise InvalidArgument(f"status must be one of {', '.join(FILTERS)}.", pointer="/status")
    scope = f"{job.caller}|{run.job_id}|{run.run_id}|{status}"
    after = None if cursor is None else await _position(env, run, cursor, scope)
    query = TasksOf(
        job_id=run.job_id,
        run_id=run.run_id,
        shard_count=run.shard_count,
        statuses=FILTERS[status],
        after=after,
        limit=limit + 1,
    )
    rows = await env.store.find(query)
    if len(rows) <= limit:
        return ResultPage(rows, None)
    sign = partial(env.vault.sign, purpose="cursor")
    return ResultPage(
        rows[:limit], paging.make_cursor(rows[limit - 1].task_id, scope=scope, sign=sign)
    )


async def _position(env: Env, run: Run, cursor: str, scope: str) -> TaskId:
    """A signed cursor, or the plain id of a task of this run (what older clients kept)."""
    sign = partial(env.vault.sign, purpose="cursor")
    try:
        return TaskId(paging.read_cursor(cursor, scope=scope, sign=sign))
    except InvalidArgument:
        try:
            return (await task_of(env, run, cursor)).task_id
        except NotFound:
            pass
        raise


async def body_of(env: Env, run: Run, task_id: str) -> tuple[Task, Body | None]:
    """The task and its body; the task alone when it failed; TaskNotReady before it ended."""
    task = await task_of(env, run, task_id)
    if task.status not in TASK_TERMINAL:
        raise TaskNotReady("The task has not ended yet.")
    if task.result is None:
        return task, None
    pieces = env.blobs.open(task.result.key)
    try:
        first = await anext(pieces, b"")
    except BlobMissing:
        raise NotFound("The body of this task is no longer stored.") from None
    return task, Body(task.result, _with_first(first, pieces))


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()


def link_token(env: Env, run: Run, task: Task) -> str:
    """What makes a body's address work without a key, for a day."""
    expires = int(env.now() + limits.RESULT_URL_TTL_S)
    return f"{expires}.{_link_signature(env, run.job_id, run.run_id, task.task_id, expires)}"


async def run_by_link(
    env: Env, job_id: str, run_id: str, task_id: str, token: str
) -> tuple[Job, Run]:
    """The run that a signed link leads to; NotFound for any link that we did not make, and once
    the job or the run is deleted."""
    text, _, signature = token.partition(".")
    expires = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
    expected = _link_signature(env, JobId(job_id), RunId(run_id), TaskId(task_id), expires)
    if not signature.isascii() or not hmac.compare_digest(expected, signature):
        raise NotFound("There is no such task.")
    if expires < env.now():
        raise NotFound("The link has expired; list the results again for a new one.")
    job = await env.store.read(JobKey(JobId(job_id)))
    run = await env.store.read(RunKey(JobId(job_id), RunId(run_id)))
    if job is None or job.status not in JOB_VISIBLE or run is None or run.status not in RUN_VISIBLE:
        raise NotFound("There is no such task.")
    return job, run


def _link_signature(env: Env, job_id: JobId, run_id: RunId, task_id: TaskId, expires: int) -> str:
    return env.vault.sign(f"{job_id}/{run_id}/{task_id}/{expires}", purpose="result")


def owner_scope(caller: CallerId, what: str) -> str:
    """What cursors of a caller's own lists are bound to."""
    return f"{caller}|{what}"
