"""Finds tasks of a run by what their rows are not ordered by, and sums their figures per host
(docs/api.md, Results)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import TaskId
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import FailureReason, Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.domain.submit.target import host_of
from conveyor.usecases.context import Context


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that are checked row by row, and the order of the result. `text` is in lower
    case and part of the URL."""

    reason: FailureReason | None = None
    host: str | None = None
    text: str | None = None
    in_list_order: bool = False

    @property
    def is_empty(self) -> bool:
        return self == TaskFilter()

    @property
    def scope(self) -> str:
        """A text that is the same for equal filters, in every process."""
        return f"{self.reason}|{self.host}|{self.text}|{self.in_list_order}"

    def matches(self, task: Task) -> bool:
        return (
            self.reason in {None, task.reason}
            and (self.text is None or self.text in task.url.lower())
            and (self.host is None or self.host == host_of(task.url))
        )


async def find_tasks(
    env: Context, query: TasksOf, wanted: TaskFilter
) -> tuple[list[Task], TaskId | None]:
    """Returns up to `limit` tasks in id order, and the id after which the next page starts.

    A page ends after about ROWS_READ_MAX rows, however rare the matching tasks are.
    """
    tasks: list[Task] = []
    position, left = query.after, limits.ROWS_READ_MAX
    while left > 0:
        page = msgspec.structs.replace(query, after=position, limit=limits.PAGE_ROWS_MAX)
        found = await env.store.page_tasks(page, read_max=left)
        for task in found.tasks:
            if wanted.matches(task):
                tasks.append(task)
                if len(tasks) == query.limit:
                    return tasks, task.task_id
        position = found.until
        if position is None:
            return tasks, None
        # A page that is not full has read as many rows as it might.
        is_full = len(found.tasks) == page.limit
        left = left - len(found.tasks) if is_full else 0
    return tasks, position


async def find_in_list_order(
    env: Context, query: TasksOf, wanted: TaskFilter, *, after: int
) -> tuple[list[Task], int | None]:
    """Returns up to `limit` tasks in the order of the list, skipping `after` of them.

    Rows are ordered by id, so this reads the whole run. Raises InvalidArgument for a long run.
    """
    matching = [task async for task in _walk(env, query) if wanted.matches(task)]
    matching.sort(key=lambda task: (task.batch_id, task.index))
    until = after + query.limit
    return matching[after:until], until if until < len(matching) else None


async def _walk(env: Context, query: TasksOf) -> AsyncIterator[Task]:
    position: TaskId | None = None
    count = 0
    while True:
        page = msgspec.structs.replace(query, after=position, limit=limits.PAGE_ROWS_MAX)
        found = await env.store.page_tasks(page, read_max=limits.ROWS_READ_MAX)
        for task in found.tasks:
            yield task
        count += len(found.tasks)
        position = found.until
        if position is None:
            return
        if count > limits.ORDERED_ROWS_MAX:
            raise InvalidArgument(
                f"Only a list of up to {limits.ORDERED_ROWS_MAX:,} tasks can be read in its order.",
                pointer="/order",
            )


@dataclass(slots=True)
class HostFigures:
    """The tasks of one host. `seconds` are the durations of their last attempts."""

    host: str
    total: int = 0
    successful: int = 0
    failed: int = 0
    inflight: int = 0
    bytes: int = 0
    credits: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, task: Task) -> None:
        self.total += 1
        self.successful += task.status is TaskStatus.SUCCESSFUL
        self.failed += task.status is TaskStatus.FAILED
        self.inflight += task.status is TaskStatus.PROCESSING
        self.credits += task.credits
        if task.result is not None:
            self.bytes += task.result.size_bytes
        if task.reason is not None:
            self.reasons[task.reason] += 1
        if task.status in TASK_TERMINAL and task.history:
            self.seconds.append(task.history[-1].ended_at - task.history[-1].started_at)

    @property
    def median_s(self) -> float | None:
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else None


async def sum_hosts(env: Context, query: TasksOf) -> tuple[list[HostFigures], bool]:
    """Sums the tasks of each host, those with the most failures first, from up to HOST_ROWS_MAX
    rows. The second value tells whether these were all rows."""
    figures: dict[str, HostFigures] = {}
    position: TaskId | None = None
    count = 0
    while count < limits.HOST_ROWS_MAX:
        page = msgspec.structs.replace(query, after=position, limit=limits.PAGE_ROWS_MAX)
        found = await env.store.page_tasks(page, read_max=limits.ROWS_READ_MAX)
        for task in found.tasks:
            host = host_of(task.url) or ""
            figures.setdefault(host, HostFigures(host)).add(task)
        count += len(found.tasks)
        position = found.until
        if position is None:
            break
    by_failures = sorted(figures.values(), key=lambda each: (-each.failed, -each.total, each.host))
    return by_failures[: limits.HOSTS_SHOWN_MAX], position is None
