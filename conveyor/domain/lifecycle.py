"""The tables of all legal transitions. No other module decides about transitions (SPEC.md 3.1).

Two rules apply. A terminal status can only change to deleted; a notice can also be redelivered. An
engine never names a status: it gets the set that `sources` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from conveyor.domain.errors import IllegalTransition
from conveyor.domain.export.export import ExportStatus
from conveyor.domain.model import (
    BatchStatus,
    CounterState,
    JobStatus,
    NoticeStatus,
    Run,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.run.counters import Totals
from conveyor.domain.schedule.schedule import ScheduleStatus

Status = TypeVar("Status", bound=StrEnum)
Table = Mapping[str, tuple[frozenset[Status], Status]]


def _table(**rows: tuple[set[Status], Status]) -> Table[Status]:
    return {event: (frozenset(sources), target) for event, (sources, target) in rows.items()}


JOB: Table[JobStatus] = _table(
    closed=({JobStatus.OPEN}, JobStatus.CLOSED),
    deleted=({JobStatus.OPEN, JobStatus.CLOSED}, JobStatus.DELETED),
)

_LIVE = {RunStatus.RUNNING, RunStatus.PENDING}

# `drained` and `fed` are computed from the counters on each read and never written: a stored
# `pending` could contradict the counters if a list is added at the same time.
RUN: Table[RunStatus] = _table(
    drained=({RunStatus.RUNNING}, RunStatus.PENDING),
    fed=({RunStatus.PENDING}, RunStatus.RUNNING),
    completed=(_LIVE, RunStatus.COMPLETED),
    stopped=(_LIVE, RunStatus.STOPPED),
    failed=(_LIVE, RunStatus.FAILED),
    deleted=(
        _LIVE | {RunStatus.COMPLETED, RunStatus.STOPPED, RunStatus.FAILED},
        RunStatus.DELETED,
    ),
)

TASK: Table[TaskStatus] = _table(
    claimed=({TaskStatus.PENDING, TaskStatus.PROCESSING}, TaskStatus.PROCESSING),
    released=({TaskStatus.PROCESSING}, TaskStatus.PENDING),
    succeeded=({TaskStatus.PROCESSING}, TaskStatus.SUCCESSFUL),
    failed=({TaskStatus.PROCESSING}, TaskStatus.FAILED),
)

BATCH: Table[BatchStatus] = _table(
    sealed=({BatchStatus.OPEN}, BatchStatus.SEALED),
    abandoned=({BatchStatus.OPEN}, BatchStatus.ABANDONED),
)

GATE: Table[CounterState] = _table(
    draining=({CounterState.OPEN, CounterState.DRAINING}, CounterState.DRAINING),
    closed=({CounterState.OPEN, CounterState.DRAINING}, CounterState.CLOSED),
)

NOTICE: Table[NoticeStatus] = _table(
    delivered=({NoticeStatus.DUE}, NoticeStatus.DELIVERED),
    exhausted=({NoticeStatus.DUE}, NoticeStatus.EXHAUSTED),
    dropped=({NoticeStatus.DUE}, NoticeStatus.DROPPED),
    redelivered=(set(NoticeStatus), NoticeStatus.DUE),
)

SCHEDULE: Table[ScheduleStatus] = _table(
    paused=({ScheduleStatus.ACTIVE}, ScheduleStatus.PAUSED),
    resumed=({ScheduleStatus.PAUSED}, ScheduleStatus.ACTIVE),
)

_UNDONE = {ExportStatus.PENDING, ExportStatus.RUNNING}

EXPORT: Table[ExportStatus] = _table(
    taken_up=(_UNDONE, ExportStatus.RUNNING),
    completed=({ExportStatus.RUNNING}, ExportStatus.COMPLETED),
    failed=(_UNDONE, ExportStatus.FAILED),
)

RUN_LIVE = frozenset(_LIVE)
RUN_TERMINAL = frozenset(RunStatus) - RUN_LIVE
TASK_TERMINAL = frozenset({TaskStatus.SUCCESSFUL, TaskStatus.FAILED})
TASK_UNFINISHED = frozenset(TaskStatus) - TASK_TERMINAL
SETTLES_PASS = frozenset({CounterState.OPEN})
RELEASES_PASS = frozenset({CounterState.OPEN, CounterState.DRAINING})
JOB_VISIBLE = frozenset({JobStatus.OPEN, JobStatus.CLOSED})
RUN_VISIBLE = frozenset(RunStatus) - {RunStatus.DELETED}
SCHEDULE_FIRES = frozenset({ScheduleStatus.ACTIVE})
RUN_ENDED = RUN_VISIBLE - RUN_LIVE
EXPORT_UNDONE = frozenset(_UNDONE)


def sources(table: Table[Status], event: str) -> frozenset[Status]:
    """Returns the statuses in which `event` is legal."""
    return table[event][0]


def target(table: Table[Status], event: str) -> Status:
    """Returns the status after `event`."""
    return table[event][1]


def step(table: Table[Status], status: Status, event: str) -> Status:
    """Returns the status after `event`. Raises IllegalTransition if the table has no such row."""
    if event not in table or status not in table[event][0]:
        raise IllegalTransition(f"{event} from {status}")
    return table[event][1]


def displayed_status(run: Run, totals: Totals) -> RunStatus:
    """Returns the status to show. A live open run without unfinished tasks is `pending`."""
    idle = not run.last_batch_received and not run.open_batches and totals.done == run.total
    if run.status in RUN_LIVE and idle:
        return step(RUN, RunStatus.RUNNING, "drained")
    return run.status


def is_complete(run: Run, totals: Totals) -> bool:
    """Whether no list can be added, no list is being ingested, and every task is terminal."""
    return run.last_batch_received and run.open_batches == 0 and totals.done >= run.total


def mermaid(table: Table[Status]) -> str:
    """Returns the table as a state diagram. SPEC.md 3.1 contains exactly this text."""
    lines = ["stateDiagram-v2"]
    for event, (starts, end) in table.items():
        lines += [f"    {start} --> {end}: {event}" for start in sorted(starts)]
    return "\n".join(lines)
