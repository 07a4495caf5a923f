"""Lookup: finds the job, run or task that a caller names (SPEC.md 5.1).

A foreign id is treated as an unknown id, so that no response reveals whether an id exists.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from conveyor.domain.budget import Budget
from conveyor.domain.changes import BudgetKey, JobKey, RunKey, TaskKey
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import CallerId, JobId, RunId, TaskId, is_task_id, is_ulid, shard_of
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE
from conveyor.domain.model import Job, Run, Task, TaskStatus, Totals
from conveyor.domain.queries import StatsOf, TasksOf, sum_stats
from conveyor.usecases.context import Context, Read, together

_NO_JOB = "There is no such job."
_NO_RUN = "There is no such run."
_NO_TASK = "There is no such task."


async def load_owned_job(env: Context, caller: CallerId, job_id: str) -> Job:
    """Returns the caller's job. An unknown, deleted or foreign one raises the same NotFound."""
    # The id comes from the client: a text that cannot be an id is not sent to the store.
    job = await env.store.read(JobKey(JobId(job_id))) if is_ulid(job_id) else None
    if job is None or job.caller != caller or job.status not in JOB_VISIBLE:
        raise NotFound(_NO_JOB)
    return job


async def is_tombstone(env: Context, caller: CallerId, job_id: str) -> bool:
    """Returns whether the caller had this job and deleted it."""
    job = await env.store.read(JobKey(JobId(job_id))) if is_ulid(job_id) else None
    return job is not None and job.caller == caller and job.status not in JOB_VISIBLE


async def load_owned_run(env: Context, job: Job, run_id: str) -> Run:
    """Returns one run of a job that the caller owns."""
    run = await env.store.read(RunKey(job.job_id, RunId(run_id))) if is_ulid(run_id) else None
    if run is None or run.job_id != job.job_id or run.status not in RUN_VISIBLE:
        raise NotFound(_NO_RUN)
    return run


async def visible_run(
    env: Context, job_id: JobId, run_id: RunId, *, absent: str
) -> tuple[Job, Run]:
    """Returns the job and the run of a signed link, which ends with the job and with the run."""
    job = await env.store.read(JobKey(job_id))
    run = await env.store.read(RunKey(job_id, run_id))
    if job is None or job.status not in JOB_VISIBLE or run is None or run.status not in RUN_VISIBLE:
        raise NotFound(absent)
    return job, run


async def load_owned_job_and_run(
    env: Context, caller: CallerId, job_id: str, *more: Read
) -> tuple[Job, Run | None, list[Any]]:
    """Returns the caller's job and its latest run, and the results of `more` reads that are made
    at the same time. If both rows were seen before, it is one step."""
    seen = env.seen_runs.find(caller, job_id)
    reads: list[Read] = [partial(load_owned_job, env, caller, job_id), *more]
    if seen is not None:
        reads.insert(1, partial(env.store.read, RunKey(seen.job_id, seen.run_id)))
    job, *results = await together(*reads)
    run = None if seen is None else results.pop(0)
    if seen is None or job.latest_run_id != seen.run_id:
        run = await latest_run(env, job)
    env.seen_runs.note(job, run)
    return job, run, results


async def latest_run(env: Context, job: Job) -> Run | None:
    if job.latest_run_id is None:
        return None
    return await env.store.read(RunKey(job.job_id, job.latest_run_id))


async def require_latest_run(env: Context, job: Job) -> Run:
    return require_run(await latest_run(env, job))


def require_run(run: Run | None) -> Run:
    if run is None:
        raise NotFound(_NO_RUN)
    return run


async def load_task(env: Context, run: Run, task_id: str) -> Task:
    if not is_task_id(task_id):
        raise NotFound(_NO_TASK)
    # The shard is part of a task's key and follows from its id.
    shard = shard_of(TaskId(task_id), run.shard_count)
    task = await env.store.read(TaskKey(run.job_id, run.run_id, TaskId(task_id), shard))
    if task is None:
        raise NotFound(_NO_TASK)
    return task


async def totals_of(env: Context, run: Run) -> Totals:
    """Returns the run's counters: the sum of its stats rows. Each shard's row is exact; the sum is
    not a snapshot over all shards."""
    query = StatsOf(job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count)
    return sum_stats(await env.store.find(query))


async def load_budget(env: Context, run: Run) -> Budget | None:
    if run.budget is None:
        return None
    return await env.store.read(BudgetKey(run.job_id, run.run_id))


# Page walks: all tasks of a run, page by page.


async def pages_of(
    env: Context,
    run: Run,
    *,
    statuses: frozenset[TaskStatus] | None = None,
    after: TaskId | None = None,
    limit: int | None = None,
) -> AsyncGenerator[list[Task], None]:
    """Yields the tasks in id order. A page is never empty. Close the generator if you stop
    early."""
    limit = limit or env.config.chunk_tasks
    while True:
        query = TasksOf(
            job_id=run.job_id,
            run_id=run.run_id,
            shard_count=run.shard_count,
            statuses=statuses,
            after=after,
            limit=limit,
        )
        page = await env.store.page_tasks(query, read_max=env.config.rows_read_max)
        # A page may be empty although more follow: `read_max` bounds the rows read, not the rows
        # found.
        if page.tasks:
            yield page.tasks
        if page.until is None:
            return
        after = page.until
