"""Change: what a decision wants written, in words that every engine can obey
(docs/engines.md, Changes and guards).

One guarded write decides; everything after it is commutative, idempotent or repairable. A guard
carries facts, never code, so that SQL, DynamoDB and memory can each check it in their own way.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from conveyor.domain.backpressure.budget import Budget, BudgetReservation
from conveyor.domain.event import Event, EventSequence
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
    IdempotencyRecord,
    Job,
    Notice,
    Run,
    ShardCounters,
    Task,
    TaskRef,
)
from conveyor.domain.schedule.schedule import Schedule
from conveyor.domain.submit.upload import JobInput
from conveyor.domain.webhook.keys import SigningKeys

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
    """Facts that must hold for the row as it is now.

    `status_in`: its status is one of these. `equals`: these fields have these values.
    `lapsed`: this field, an instant, lies before that instant. `at_least`: this field, a number,
    is that or more.
    """

    status_in: frozenset[str] | None = None
    equals: tuple[tuple[str, Any], ...] = ()
    lapsed: tuple[str, float] | None = None
    at_least: tuple[str, int] | None = None


ANY = Guard()


class Insert(msgspec.Struct, frozen=True):
    """Puts a new row; refused when one is there, unless that one's `expires_at` is past `now`."""

    key: AnyKey
    row: Row
    over_expired_at: float | None = None


class Update(msgspec.Struct, frozen=True):
    """Sets `values` and adds `deltas` on an existing row that passes `guard`. Creates nothing.

    A quiet update answers None instead of its row, which spares the engine the reading of it.
    """

    key: AnyKey
    guard: Guard
    values: dict[str, Any] = {}
    deltas: dict[str, int] = {}
    is_quiet: bool = False


class Delete(msgspec.Struct, frozen=True):
    """Removes a row that passes `guard`; an absent row is fine."""

    key: AnyKey
    guard: Guard = ANY


Write = Insert | Update | Delete


class Enqueue(msgspec.Struct, frozen=True):
    """Refs to put on a run's queue: with the change where the engine can, else right after it."""

    refs: tuple[TaskRef, ...]


class Change(msgspec.Struct, frozen=True):
    """Writes that happen together or not at all, and the effects that follow from them."""

    writes: tuple[Write, ...]
    effects: tuple[Enqueue, ...] = ()


def is_tally(change: Change) -> bool:
    """A change of one row that a counter row keeps count of: a settle, in a word."""
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

    None stands for a row that was deleted, or that nobody wanted to see.
    """

    rows: tuple[Row | None, ...]


class Stale(msgspec.Struct, frozen=True):
    """A guard did not hold; nothing was written. `row` is what stands there."""

    key: AnyKey
    row: Row | None = None


class Missing(msgspec.Struct, frozen=True):
    """A row that the change needs does not exist; nothing was written."""

    key: AnyKey


Verdict = Applied | Stale | Missing


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an ingest: rows, their refs, their counts, and the checkpoint behind them.

    `tasks` are inserted where absent; `refs` name those that must run; the counts of the shards
    move, and the batch advances, only if `epoch` is still the batch's.
    """

    key: BatchKey
    epoch: int
    done_before: int
    tasks: tuple[Task, ...]
    refs: tuple[TaskRef, ...]
    stats: dict[int, dict[str, int]]
    values: dict[str, Any]
    gate_in: frozenset[str]
