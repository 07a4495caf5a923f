"""The laws of Store.page_tasks: pages of the tasks of a run that read a bounded number of rows
(docs/engines.md, Changes and guards)."""

from __future__ import annotations

import pytest

from conveyor.domain.ids import TaskId
from conveyor.domain.model import Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.ports.store import Store
from tests.builders import JOB, RUN, a_task, keep


@pytest.mark.parametrize(("read_max", "limit"), [(1, 3), (7, 1), (7, 5), (100, 3)])
@pytest.mark.parametrize("searched_status", [None, TaskStatus.FAILED, TaskStatus.PENDING])
async def test_bounded_pages_return_each_task_once_and_always_advance(
    store: Store, read_max: int, limit: int, searched_status: TaskStatus | None
) -> None:
    rare = [TaskStatus.FAILED if index in {3, 17} else TaskStatus.SUCCESSFUL for index in range(24)]
    tasks = [a_task(index, shard=index % 4, status=status) for index, status in enumerate(rare)]
    await keep(store, *tasks)
    statuses = None if searched_status is None else frozenset({searched_status})
    all_tasks: list[Task] = []
    ends: list[TaskId | None] = [None]

    while ends == [None] or ends[-1] is not None:
        query = TasksOf(
            job_id=JOB, run_id=RUN, shard_count=4, statuses=statuses, after=ends[-1], limit=limit
        )
        page = await store.page_tasks(query, read_max=read_max)
        assert len(page.tasks) <= limit
        all_tasks += page.tasks
        ends.append(page.until)

    places = [end for end in ends if end is not None]
    assert places == sorted(set(places))
    expected = [task for task in tasks if searched_status in {None, task.status}]
    assert all_tasks == sorted(expected, key=lambda task: task.task_id)
