"""Query: the few ways to find rows other than by their key
(docs/storage.md, Queries)."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from conveyor.domain import limits
from conveyor.domain.crawl_record import Crawl, CrawlStep
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.export_record import Export
from conveyor.domain.ids import CallerId, JobId, NoticeId, RunId, TaskId
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    CounterSample,
    Crossing,
    DeletionIntent,
    Event,
    FailureReason,
    Job,
    JobInput,
    JobStatus,
    JobType,
    Notice,
    NoticeStatus,
    Run,
    RunStatus,
    ShardCounters,
    Task,
    TaskRef,
    TaskStatus,
    Totals,
)
from conveyor.domain.schedule import Schedule, ScheduleStatus

Q = TypeVar(
    "Q",
    Job,
    Run,
    Batch,
    ShardCounters,
    Task,
    Notice,
    DeletionIntent,
    Event,
    Schedule,
    Export,
    JobInput,
    CounterSample,
    Crossing,
    Crawl,
    CrawlStep,
)


class Query(msgspec.Struct, Generic[Q], frozen=True):
    """A query that returns rows in a defined order."""


class TasksOf(Query[Task], frozen=True, kw_only=True):
    """Tasks of a run in id order."""

    job_id: JobId
    run_id: RunId
    shard_count: int
    statuses: frozenset[TaskStatus] | None = None
    after: TaskId | None = None
    limit: int

    @property
    def have_problems(self) -> bool:
        """Whether the query asks for failed tasks only. Exactly these tasks have a problem."""
        return self.statuses == frozenset({TaskStatus.FAILED})


class TasksAt(Query[Task], frozen=True, kw_only=True):
    """The tasks that these references name, each once, in any order. Tasks that do not exist are
    left out. A row may be shown as it was a second ago: what it shows must be guarded by a number
    that later changes raise, as settles are."""

    refs: tuple[TaskRef, ...]


class TaskPage(msgspec.Struct, frozen=True):
    """Tasks in id order, and the id after which the next page starts; None at the end."""

    tasks: list[Task]
    until: TaskId | None


def page_of(tasks: list[Task], query: TasksOf) -> TaskPage:
    """Makes the page of an engine that read until the limit or the end."""
    is_full = len(tasks) == query.limit
    return TaskPage(tasks, tasks[-1].task_id if is_full else None)


class StatsOf(Query[ShardCounters], frozen=True, kw_only=True):
    """All stats rows of a run, by shard."""

    job_id: JobId
    run_id: RunId
    shard_count: int


def sum_stats(rows: list[ShardCounters]) -> Totals:
    reasons = {
        reason.value: count
        for reason in FailureReason
        if (count := sum(getattr(row, reason.value) for row in rows))
    }
    return Totals(
        admitted=sum(row.admitted for row in rows),
        done=sum(row.done for row in rows),
        successful=sum(row.successful for row in rows),
        failed=sum(row.failed for row in rows),
        reasons=reasons,
        credits=sum(row.credits for row in rows),
        cost_micros=sum(row.cost_micros for row in rows),
        retrying=sum(row.retrying for row in rows),
        stored_bytes=sum(row.stored_bytes for row in rows),
    )


class JobsOf(Query[Job], frozen=True, kw_only=True):
    """Jobs of a caller, newest first."""

    caller: CallerId
    statuses: frozenset[JobStatus]
    type: JobType | None = None
    external_id: str | None = None
    before: JobId | None = None
    limit: int


class RunsOf(Query[Run], frozen=True, kw_only=True):
    """Runs of a job, newest first."""

    job_id: JobId
    statuses: frozenset[RunStatus]
    before: int | None = None
    limit: int


class BatchesOf(Query[Batch], frozen=True, kw_only=True):
    """Batches of a run, oldest first."""

    job_id: JobId
    run_id: RunId


class SamplesOf(Query[CounterSample], frozen=True, kw_only=True):
    """Samples of the counters of a run, oldest first."""

    job_id: JobId
    run_id: RunId
    limit: int


class RunsIn(Query[Run], frozen=True, kw_only=True):
    """Runs of any caller in these statuses that changed since a time, in run id order."""

    statuses: frozenset[RunStatus]
    updated_since: float = 0.0
    after: RunId | None = None
    limit: int


class BatchesIn(Query[Batch], frozen=True, kw_only=True):
    """Batches of any run in these statuses without progress since a time, oldest first."""

    statuses: frozenset[BatchStatus]
    idle_since: float
    limit: int


class DueNotices(Query[Notice], frozen=True, kw_only=True):
    """Notices in these statuses that are due, oldest first."""

    statuses: frozenset[NoticeStatus]
    due_by: float
    limit: int


class NoticesOf(Query[Notice], frozen=True, kw_only=True):
    """Notices of a job, or of one of its runs: those of the newest run first, each run's newest
    first. `before` is the run, the time and the id of the last one seen."""

    job_id: JobId
    run_id: RunId | None = None
    before: tuple[RunId, float, NoticeId] | None = None
    limit: int


class DueScrubs(Query[DeletionIntent], frozen=True, kw_only=True):
    """Deletion intents that are due, oldest first."""

    due_by: float
    limit: int


class UnfinishedCrossings(Query[Crossing], frozen=True, kw_only=True):
    """Changes over two stores whose second part may not be written, oldest first."""

    limit: int


class EventsOf(Query[Event], frozen=True, kw_only=True):
    """Numbered events of a caller after a number, in the order of their numbers."""

    caller: CallerId
    after: int
    limit: int


class UnplacedEvents(Query[Event], frozen=True, kw_only=True):
    """Events of any caller before a time that have no number yet, oldest first."""

    before: float
    limit: int


class DueSchedules(Query[Schedule], frozen=True, kw_only=True):
    """Schedules in these statuses that are due by a time, soonest first.

    `after` is the time and the job at the end of the previous page.
    """

    statuses: frozenset[ScheduleStatus]
    due_by: float
    after: tuple[float, JobId] | None = None
    limit: int


class DueExports(Query[Export], frozen=True, kw_only=True):
    """Exports that are due, to be made or to be removed, oldest first."""

    due_by: float
    limit: int


class DueExpiries(Query[Run], frozen=True, kw_only=True):
    """Runs whose bodies are to be removed, oldest first."""

    due_by: float
    limit: int


class ExpiredInputs(Query[JobInput], frozen=True, kw_only=True):
    """File inputs that expired before a time, oldest first."""

    expired_by: float
    limit: int


class DueCrawls(Query[Crawl], frozen=True, kw_only=True):
    """Crawls that are due, oldest first."""

    due_by: float
    limit: int


class CrawlStepsOf(Query[CrawlStep], frozen=True, kw_only=True):
    """Steps of a crawl from a number on, in order."""

    job_id: JobId
    run_id: RunId
    first: int
    limit: int


AnyQuery = (
    TasksOf
    | TasksAt
    | StatsOf
    | JobsOf
    | RunsOf
    | BatchesOf
    | SamplesOf
    | RunsIn
    | BatchesIn
    | DueNotices
    | NoticesOf
    | DueScrubs
    | UnfinishedCrossings
    | EventsOf
    | UnplacedEvents
    | DueSchedules
    | DueExports
    | DueExpiries
    | ExpiredInputs
    | DueCrawls
    | CrawlStepsOf
)


# Cursors are signed and valid only for their scope. The last id of a page is the position
# (docs/api.md, Results).


Sign = Callable[[str], str]


def make_cursor(position: str, *, scope: str, sign: Sign) -> str:
    """Returns a cursor for `position` that is valid only for `scope`."""
    signature = sign(f"{scope}\n{position}")
    packed = base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")
    return f"v1.{packed}.{signature}"


def read_cursor(cursor: str, *, scope: str, sign: Sign) -> str:
    """Returns the position in a cursor. Raises InvalidArgument if it was not made for `scope`."""
    if len(cursor) > limits.CURSOR_CHARS_MAX or not cursor.isascii():
        raise _invalid()
    version, _, rest = cursor.partition(".")
    packed, _, signature = rest.partition(".")
    if version != "v1" or not packed:
        raise _invalid()
    try:
        position = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise _invalid() from None
    expected = sign(f"{scope}\n{position}")
    same_text = make_cursor(position, scope=scope, sign=lambda _: signature) == cursor
    if not same_text or not hmac.compare_digest(expected, signature):
        raise _invalid()
    return position


def _invalid() -> InvalidArgument:
    return InvalidArgument(
        "The cursor is not one that this list answered with; start again without it.",
        pointer="/cursor",
        code="invalid_cursor",
    )
