"""The tables of all legal transitions, and the rules that follow from several fields of a run. No
other module decides about transitions (SPEC.md 3.1).

Two rules apply. A terminal status can only change to deleted; a notice can also be redelivered. An
engine never names a status: it gets the set that `sources` returns.

Each machine has its own type of events, so that a misspelt event, or an event of another machine,
is a type error. A change that keeps the status has an event of its own: the statuses in which it is
legal are a rule like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from conveyor.domain.changes import Guard
from conveyor.domain.crawl_record import CrawlStatus
from conveyor.domain.export_record import ExportStatus
from conveyor.domain.model import (
    BatchStatus,
    CounterState,
    JobStatus,
    NoticeStatus,
    Run,
    RunStatus,
    TaskStatus,
    Totals,
)
from conveyor.domain.schedule import ScheduleStatus

Status = TypeVar("Status", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Table = Mapping[Event, tuple[frozenset[Status], Status]]


def _table(rows: dict[Event, tuple[set[Status], Status]]) -> Table[Event, Status]:
    return {event: (frozenset(sources), target) for event, (sources, target) in rows.items()}


class JobEvent(StrEnum):
    CLOSED = "closed"
    DELETED = "deleted"


JOB: Table[JobEvent, JobStatus] = _table(
    {
        JobEvent.CLOSED: ({JobStatus.OPEN}, JobStatus.CLOSED),
        JobEvent.DELETED: ({JobStatus.OPEN, JobStatus.CLOSED}, JobStatus.DELETED),
    }
)

_LIVE = {RunStatus.RUNNING, RunStatus.PENDING}


class RunEvent(StrEnum):
    DRAINED = "drained"
    FED = "fed"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    DELETED = "deleted"


# `drained` and `fed` are computed from the counters on each read and never written: a stored
# `pending` could contradict the counters if a list is added at the same time.
RUN: Table[RunEvent, RunStatus] = _table(
    {
        RunEvent.DRAINED: ({RunStatus.RUNNING}, RunStatus.PENDING),
        RunEvent.FED: ({RunStatus.PENDING}, RunStatus.RUNNING),
        RunEvent.COMPLETED: (_LIVE, RunStatus.COMPLETED),
        RunEvent.STOPPED: (_LIVE, RunStatus.STOPPED),
        RunEvent.FAILED: (_LIVE, RunStatus.FAILED),
        RunEvent.DELETED: (
            _LIVE | {RunStatus.COMPLETED, RunStatus.STOPPED, RunStatus.FAILED},
            RunStatus.DELETED,
        ),
    }
)


class TaskEvent(StrEnum):
    CLAIMED = "claimed"
    EXTENDED = "extended"
    RELEASED = "released"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


TASK: Table[TaskEvent, TaskStatus] = _table(
    {
        TaskEvent.CLAIMED: ({TaskStatus.PENDING, TaskStatus.PROCESSING}, TaskStatus.PROCESSING),
        TaskEvent.EXTENDED: ({TaskStatus.PENDING, TaskStatus.PROCESSING}, TaskStatus.PROCESSING),
        TaskEvent.RELEASED: ({TaskStatus.PENDING, TaskStatus.PROCESSING}, TaskStatus.PENDING),
        TaskEvent.SUCCEEDED: (
            {TaskStatus.PENDING, TaskStatus.PROCESSING},
            TaskStatus.SUCCESSFUL,
        ),
        TaskEvent.FAILED: ({TaskStatus.PENDING, TaskStatus.PROCESSING}, TaskStatus.FAILED),
    }
)


class BatchEvent(StrEnum):
    ACQUIRED = "acquired"
    SEALED = "sealed"
    ABANDONED = "abandoned"


BATCH: Table[BatchEvent, BatchStatus] = _table(
    {
        BatchEvent.ACQUIRED: ({BatchStatus.OPEN}, BatchStatus.OPEN),
        BatchEvent.SEALED: ({BatchStatus.OPEN}, BatchStatus.SEALED),
        BatchEvent.ABANDONED: ({BatchStatus.OPEN}, BatchStatus.ABANDONED),
    }
)


class CounterEvent(StrEnum):
    DRAINING = "draining"
    CLOSED = "closed"


COUNTERS: Table[CounterEvent, CounterState] = _table(
    {
        CounterEvent.DRAINING: (
            {CounterState.OPEN, CounterState.DRAINING},
            CounterState.DRAINING,
        ),
        CounterEvent.CLOSED: ({CounterState.OPEN, CounterState.DRAINING}, CounterState.CLOSED),
    }
)


class NoticeEvent(StrEnum):
    CLAIMED = "claimed"
    POSTPONED = "postponed"
    RETRIED = "retried"
    DELIVERED = "delivered"
    EXHAUSTED = "exhausted"
    DROPPED = "dropped"
    REDELIVERED = "redelivered"


NOTICE: Table[NoticeEvent, NoticeStatus] = _table(
    {
        NoticeEvent.CLAIMED: ({NoticeStatus.DUE}, NoticeStatus.DUE),
        NoticeEvent.POSTPONED: ({NoticeStatus.DUE}, NoticeStatus.DUE),
        NoticeEvent.RETRIED: ({NoticeStatus.DUE}, NoticeStatus.DUE),
        NoticeEvent.DELIVERED: ({NoticeStatus.DUE}, NoticeStatus.DELIVERED),
        NoticeEvent.EXHAUSTED: ({NoticeStatus.DUE}, NoticeStatus.EXHAUSTED),
        NoticeEvent.DROPPED: ({NoticeStatus.DUE}, NoticeStatus.DROPPED),
        NoticeEvent.REDELIVERED: (set(NoticeStatus), NoticeStatus.DUE),
    }
)


class ScheduleEvent(StrEnum):
    PAUSED = "paused"
    RESUMED = "resumed"


SCHEDULE: Table[ScheduleEvent, ScheduleStatus] = _table(
    {
        ScheduleEvent.PAUSED: ({ScheduleStatus.ACTIVE}, ScheduleStatus.PAUSED),
        ScheduleEvent.RESUMED: ({ScheduleStatus.PAUSED}, ScheduleStatus.ACTIVE),
    }
)

_UNBUILT = {ExportStatus.PENDING, ExportStatus.RUNNING}
_UNDONE = _UNBUILT | {ExportStatus.DELIVERING}


class ExportEvent(StrEnum):
    TAKEN_UP = "taken_up"
    EXTENDED = "extended"
    DEFERRED = "deferred"
    BUILT = "built"
    SENDING = "sending"
    SENT = "sent"
    COMPLETED = "completed"
    FAILED = "failed"


EXPORT: Table[ExportEvent, ExportStatus] = _table(
    {
        ExportEvent.TAKEN_UP: (_UNBUILT, ExportStatus.RUNNING),
        ExportEvent.EXTENDED: ({ExportStatus.RUNNING}, ExportStatus.RUNNING),
        ExportEvent.DEFERRED: ({ExportStatus.RUNNING}, ExportStatus.RUNNING),
        ExportEvent.BUILT: ({ExportStatus.RUNNING}, ExportStatus.DELIVERING),
        ExportEvent.SENDING: ({ExportStatus.DELIVERING}, ExportStatus.DELIVERING),
        ExportEvent.SENT: ({ExportStatus.DELIVERING}, ExportStatus.COMPLETED),
        ExportEvent.COMPLETED: ({ExportStatus.RUNNING}, ExportStatus.COMPLETED),
        ExportEvent.FAILED: (_UNDONE, ExportStatus.FAILED),
    }
)


class CrawlEvent(StrEnum):
    ADVANCED = "advanced"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


CRAWL: Table[CrawlEvent, CrawlStatus] = _table(
    {
        CrawlEvent.ADVANCED: ({CrawlStatus.RUNNING}, CrawlStatus.RUNNING),
        CrawlEvent.COMPLETED: ({CrawlStatus.RUNNING}, CrawlStatus.COMPLETED),
        CrawlEvent.STOPPED: ({CrawlStatus.RUNNING}, CrawlStatus.STOPPED),
        CrawlEvent.FAILED: ({CrawlStatus.RUNNING}, CrawlStatus.FAILED),
    }
)

RUN_LIVE = frozenset(_LIVE)
# The statuses of live runs as rows have them: `pending` is only displayed. Queries ask for these,
# because an engine may read an index partition for each status.
RUN_LIVE_STORED = frozenset({RunStatus.RUNNING})
RUN_TERMINAL = frozenset(RunStatus) - RUN_LIVE
TASK_TERMINAL = frozenset({TaskStatus.SUCCESSFUL, TaskStatus.FAILED})
TASK_UNFINISHED = frozenset(TaskStatus) - TASK_TERMINAL
TASK_CLAIMED = frozenset({TaskStatus.PROCESSING})
SETTLES_PASS = frozenset({CounterState.OPEN})
RELEASES_PASS = frozenset({CounterState.OPEN, CounterState.DRAINING})
JOB_VISIBLE = frozenset({JobStatus.OPEN, JobStatus.CLOSED})
RUN_VISIBLE = frozenset(RunStatus) - {RunStatus.DELETED}
SCHEDULE_FIRES = frozenset({ScheduleStatus.ACTIVE})
RUN_ENDED = RUN_VISIBLE - RUN_LIVE
EXPORT_UNDONE = frozenset(_UNDONE)
BATCH_UNFINISHED = frozenset({BatchStatus.OPEN})
CRAWL_LIVE = frozenset({CrawlStatus.RUNNING})
NOTICE_WAITING = frozenset({NoticeStatus.DUE})


def sources(table: Table[Event, Status], event: Event) -> frozenset[Status]:
    """Returns the statuses in which `event` is legal."""
    return table[event][0]


def target(table: Table[Event, Status], event: Event) -> Status:
    """Returns the status after `event`."""
    return table[event][1]


def mermaid(table: Table[Event, Status]) -> str:
    """Returns the table as a state diagram. docs/architecture.md contains exactly this text."""
    lines = ["stateDiagram-v2"]
    for event, (starts, end) in table.items():
        lines += [f"    {start} --> {end}: {event}" for start in sorted(starts)]
    return "\n".join(lines)


def sources_under_claim(event: TaskEvent, claim: int) -> frozenset[TaskStatus]:
    """Returns the statuses in which the worker that holds a task under this claim number may apply
    `event`.

    Claim 0 is a first delivery, for which nothing was written: the row is still pending, or
    processing after a heartbeat. A later claim was written, so a pending row means that it was
    released, and a late write under it must be refused.
    """
    legal = sources(TASK, event)
    return legal & TASK_CLAIMED if claim else legal


# Joint rules of a run: conditions over several of its fields. The first half of a stop only records
# the request, so a run that is to be stopped has a live status until its second half.

# The condition of `accepts_settles`, for changes of a run's row.
ACCEPTS_SETTLES = Guard(status_in=RUN_LIVE, equals=(("stop_requested_at", None),))
# The condition of `accepts_lists`, for changes of the row of a first run.
ACCEPTS_LISTS = Guard(
    status_in=RUN_LIVE, equals=(("last_batch_received", False), ("stop_requested_at", None))
)


def is_stopping(run: Run) -> bool:
    """Whether a stop or a failure is recorded but not finished."""
    return run.status in RUN_LIVE and run.stop_requested_at is not None


def accepts_settles(run: Run) -> bool:
    """Whether tasks can be ingested, fetched and settled: the run is live and not stopping."""
    return run.status in RUN_LIVE and run.stop_requested_at is None


def accepts_lists(run: Run) -> bool:
    """Whether a list can be added. Only the first run of a job grows: a rerun has the tasks of the
    run before it."""
    return run.sequence == 1 and accepts_settles(run) and not run.last_batch_received


def is_complete(run: Run, totals: Totals) -> bool:
    """Whether no list can be added, no list is being ingested, and every task is terminal."""
    return run.last_batch_received and run.open_batches == 0 and totals.done >= run.total


def displayed_status(run: Run, totals: Totals) -> RunStatus:
    """Returns the status to show. A live open run without unfinished tasks is `pending`."""
    is_idle = not run.last_batch_received and not run.open_batches and totals.done == run.total
    return target(RUN, RunEvent.DRAINED) if run.status in RUN_LIVE and is_idle else run.status
