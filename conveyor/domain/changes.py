"""Change: the writes of a decision, in a form that every engine can execute
(docs/engines.md, Changes and guards).

One guarded write decides. All later effects are commutative, idempotent or repairable. A guard
contains facts, never code, so that SQL, DynamoDB and memory can each check it in their own way.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from conveyor.domain.backpressure.budget import Budget, BudgetReservation
from conveyor.domain.export.export import Export
from conveyor.domain.ids import (
    BatchId,
    CallerId,
    EventId,
    ExportId,
    InputId,
    JobId,
    NoticeId,
    RunId,
    TaskId,
)
from conveyor.domain.model import (
    Batch,
    DeletionIntent,
    Event,
    EventSequence,
    IdempotencyRecord,
    Job,
    JobInput,
    Notice,
    Run,
    ShardCounters,
    SigningKeys,
    Task,
    TaskRef,
)
from conveyor.domain.schedule.schedule import Schedule

Row = (
    Job
    | Run
    | Batch
    | ShardCounters
    | Task
    | IdempotencyRecord
    | Notice
    | DeletionIntent
    | Event
    | EventSequence
    | SigningKeys
    | Schedule
    | Export
    | JobInput
    | Budget
    | BudgetReservation
)
R = TypeVar(
    "R",
    Job,
    Run,
    Batch,
    ShardCounters,
    Task,
    IdempotencyRecord,
    Notice,
    DeletionIntent,
    Event,
    EventSequence,
    SigningKeys,
    Schedule,
    Export,
    JobInput,
    Budget,
    BudgetReservation,
)


class Key(msgspec.Struct, Generic[R], frozen=True):
    """The address of one row."""


class JobKey(Key[Job], frozen=True):
    job_id: JobId


class RunKey(Key[Run], frozen=True):
    job_id: JobId
    run_id: RunId


class BatchKey(Key[Batch], frozen=True):
    job_id: JobId
    run_id: RunId
    batch_id: BatchId


class StatsKey(Key[ShardCounters], frozen=True):
    job_id: JobId
    run_id: RunId
    shard: int


class TaskKey(Key[Task], frozen=True):
    job_id: JobId
    run_id: RunId
    task_id: TaskId
    shard: int


class RecordKey(Key[IdempotencyRecord], frozen=True):
    key_id: str


class NoticeKey(Key[Notice], frozen=True):
    notice_id: NoticeId


class ScrubKey(Key[DeletionIntent], frozen=True):
    scrub_id: str


class EventKey(Key[Event], frozen=True):
    caller: CallerId
    event_id: EventId


class FeedKey(Key[EventSequence], frozen=True):
    caller: CallerId


class SigningKeysKey(Key[SigningKeys], frozen=True):
    caller: CallerId


class ScheduleKey(Key[Schedule], frozen=True):
    job_id: JobId


class ExportKey(Key[Export], frozen=True):
    job_id: JobId
    run_id: RunId
    export_id: ExportId


class InputKey(Key[JobInput], frozen=True):
    input_id: InputId


class BudgetKey(Key[Budget], frozen=True):
    job_id: JobId
    run_id: RunId


class ShareKey(Key[BudgetReservation], frozen=True):
    job_id: JobId
    run_id: RunId
    holder: str


AnyKey = (
    JobKey
    | RunKey
    | BatchKey
    | StatsKey
    | TaskKey
    | RecordKey
    | NoticeKey
    | ScrubKey
    | EventKey
    | FeedKey
    | SigningKeysKey
    | ScheduleKey
    | ExportKey
    | InputKey
    | BudgetKey
    | ShareKey
)


class Guard(msgspec.Struct, frozen=True):
    """Facts that must be true for the current row.

    `status_in`: its status is one of these. `equals`: these fields have these values. `lapsed`:
    this field, a time, is before the given time. `at_least`: this field, a number, is not less than
    the given number.
    """

    status_in: frozenset[str] | None = None
    equals: tuple[tuple[str, Any], ...] = ()
    lapsed: tuple[str, float] | None = None
    at_least: tuple[str, int] | None = None


ANY = Guard()


class Insert(msgspec.Struct, frozen=True):
    """Inserts a row. It is refused if the row exists, unless its `expires_at` is before `now`."""

    key: AnyKey
    row: Row
    over_expired_at: float | None = None


class Update(msgspec.Struct, frozen=True):
    """Sets `values` and adds `deltas` on an existing row that passes `guard`. Creates nothing.

    A quiet update returns None instead of its row, so that the engine need not read the row.
    """

    key: AnyKey
    guard: Guard
    values: dict[str, Any] = {}
    deltas: dict[str, int] = {}
    is_quiet: bool = False


class Delete(msgspec.Struct, frozen=True):
    """Removes a row that passes `guard`. An absent row is no error."""

    key: AnyKey
    guard: Guard = ANY


Write = Insert | Update | Delete


class Enqueue(msgspec.Struct, frozen=True):
    """Refs to send to the queue of a run: with the change if the engine can, else right after."""

    refs: tuple[TaskRef, ...]


class Change(msgspec.Struct, frozen=True):
    """Writes that are executed in one transaction, and the effects that follow."""

    writes: tuple[Write, ...]
    effects: tuple[Enqueue, ...] = ()


def is_tally(change: Change) -> bool:
    """Whether a change updates one row and one counter row, as a settle does."""
    if len(change.writes) != 2 or change.effects:
        return False
    flip, count = change.writes
    return (
        isinstance(flip, Update)
        and isinstance(count, Update)
        and not (count.values or count.guard.equals or count.guard.lapsed or count.guard.at_least)
    )


class Applied(msgspec.Struct, frozen=True):
    """The change is durable; `rows` are the written rows in the order of its writes.

    None replaces a deleted row and the row of a quiet update.
    """

    rows: tuple[Row | None, ...]


class Stale(msgspec.Struct, frozen=True):
    """A guard was false, and nothing was written. `row` is the current row."""

    key: AnyKey
    row: Row | None = None


class Missing(msgspec.Struct, frozen=True):
    """A row that the change needs does not exist. Nothing was written."""

    key: AnyKey


Verdict = Applied | Stale | Missing


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an ingest: rows, their refs, their counts, and the checkpoint after them.

    The engine inserts the `tasks` that are absent. `refs` name the tasks that must run. The counts
    of the shards and the batch change only if `epoch` is still the epoch of the batch.
    """

    key: BatchKey
    epoch: int
    done_before: int
    tasks: tuple[Task, ...]
    refs: tuple[TaskRef, ...]
    stats: dict[int, dict[str, int]]
    values: dict[str, Any]
    gate_in: frozenset[str]
