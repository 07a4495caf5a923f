"""Walking: all tasks of a run, page by page, however many there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from conveyor.domain import limits
from conveyor.domain.ids import TaskId
from conveyor.domain.model import Run, Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.usecases.env import Env


async def pages_of(
    env: Env,
    run: Run,
    *,
    statuses: frozenset[TaskStatus] | None = None,
    after: TaskId | None = None,
    limit: int | None = None,
) -> AsyncGenerator[list[Task], None]:
    """Tasks in id order. A page is never empty; close the generator if you leave early."""
    limit = limit or env.policy.chunk_tasks
    while True:
        query = TasksOf(
            job_id=run.job_id,
            run_id=run.run_id,
            shard_count=run.shard_count,
            statuses=statuses,
            after=after,
            limit=limit,
        )
        page = await env.store.page_tasks(query, read_max=limits.ROWS_READ_MAX)
        if page.tasks:
            yield page.tasks
        if page.until is None:
            return
        after = page.until
