"""Change: the writes of a decision, in a form that every engine can execute
(docs/engines.md, Changes and guards).

One guarded write decides. All later effects are commutative, idempotent or repairable. A guard
contains facts, never code, so that SQL, DynamoDB and memory can each check it in their own way.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, assert_never, cast

import msgspec

from conveyor.domain.budget import Budget, BudgetReservation
from conveyor.domain.crawl_record import Crawl, CrawlStep
from conveyor.domain.damage import DamagedTask
from conveyor.domain.export_record import Export
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
    CounterSample,
    Crossing,
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
from conveyor.domain.schedule import Schedule

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
    | CounterSample
    | Crossing
    | Crawl
    | CrawlStep
)
R = TypeVar("R", bound=Row)


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

    @classmethod
    def of(cls, ref: TaskRef) -> Self:
        return cls(ref.job_id, ref.run_id, ref.task_id, ref.shard)


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


class SampleKey(Key[CounterSample], frozen=True):
    job_id: JobId
    run_id: RunId
    minute: int


class CrossingKey(Key[Crossing], frozen=True):
    job_id: JobId


class CrawlKey(Key[Crawl], frozen=True):
    job_id: JobId
    run_id: RunId


class CrawlStepKey(Key[CrawlStep], frozen=True):
    job_id: JobId
    run_id: RunId
    number: int


AnyKey = Key[Any]


class Owner(enum.Enum):
    """What a row belongs to. A deletion of a run, or of a job's runs, removes the rows of RUN."""

    RUN = "run"
    JOB = "job"
    CALLER = "caller"


class Expiry(enum.Enum):
    """The part of the program that removes a row after its `expires_at`."""

    #: `Store.delete_expired` removes the row.
    STORE = "store"
    #: The sweeper removes the row's blobs, and then the row.
    SWEEPER = "sweeper"


class RowKind(msgspec.Struct, frozen=True, eq=False):
    """A kind of row: all that engines, deletion, test builders and documents know about it.

    `name` begins the keys in DynamoDB and `table` is the table in SQLite: stored data contains
    both. `identity` are the fields of the key that identify the row, if not all of them do; a store
    may use the others to place the row. An insert of a kind with `is_new_work` makes stored data
    grow, so a store with little space left refuses it.
    """

    name: str
    table: str
    row_type: type[msgspec.Struct]
    key_type: type[Key[Any]]
    owner: Owner
    identity: tuple[str, ...] = ()
    expiry: Expiry | None = None
    is_new_work: bool = False

    @property
    def key_fields(self) -> tuple[str, ...]:
        return self.identity or self.key_type.__struct_fields__

    def address_of(self, key: AnyKey) -> tuple[Any, ...]:
        """Returns the values of the key fields. They are unique within the kind."""
        return tuple([getattr(key, name) for name in self.key_fields])

    def key_of(self, row: Row, job_id: JobId | None = None) -> AnyKey:
        """Returns the key of a row. `job_id` is necessary for tasks, whose rows do not have it."""
        fields = {
            name: job_id if name == "job_id" and self.row_type is Task else getattr(row, name)
            for name in self.key_type.__struct_fields__
        }
        return self.key_type(**fields)


# The registry. Rows of a run are deleted in this order. Run rows are the last: they state the
# number of shards, and only they connect task rows, which have no job id, to a job. An interrupted
# deletion needs both again.
ROW_KINDS = (
    RowKind(
        "Task",
        "tasks",
        Task,
        TaskKey,
        Owner.RUN,
        identity=("run_id", "task_id"),
        is_new_work=True,
    ),
    RowKind("Stats", "stats", ShardCounters, StatsKey, Owner.RUN),
    RowKind("Batch", "batches", Batch, BatchKey, Owner.RUN, is_new_work=True),
    RowKind("Notice", "notices", Notice, NoticeKey, Owner.RUN),
    RowKind(
        "Export",
        "exports",
        Export,
        ExportKey,
        Owner.RUN,
        expiry=Expiry.SWEEPER,
        is_new_work=True,
    ),
    RowKind("Budget", "budgets", Budget, BudgetKey, Owner.RUN),
    RowKind("Share", "shares", BudgetReservation, ShareKey, Owner.RUN),
    RowKind("Sample", "samples", CounterSample, SampleKey, Owner.RUN),
    RowKind("CrawlStep", "crawl_steps", CrawlStep, CrawlStepKey, Owner.RUN, is_new_work=True),
    RowKind("Crawl", "crawls", Crawl, CrawlKey, Owner.RUN, is_new_work=True),
    RowKind("Event", "events", Event, EventKey, Owner.RUN, expiry=Expiry.STORE),
    RowKind("Run", "runs", Run, RunKey, Owner.RUN, is_new_work=True),
    RowKind("Job", "jobs", Job, JobKey, Owner.JOB, is_new_work=True),
    RowKind("Schedule", "schedules", Schedule, ScheduleKey, Owner.JOB, is_new_work=True),
    RowKind("Scrub", "scrubs", DeletionIntent, ScrubKey, Owner.JOB),
    RowKind("Crossing", "crossings", Crossing, CrossingKey, Owner.JOB),
    RowKind("Key", "key_records", IdempotencyRecord, RecordKey, Owner.CALLER, expiry=Expiry.STORE),
    RowKind(
        "Input",
        "job_inputs",
        JobInput,
        InputKey,
        Owner.CALLER,
        expiry=Expiry.SWEEPER,
        is_new_work=True,
    ),
    RowKind("Feed", "feeds", EventSequence, FeedKey, Owner.CALLER),
    RowKind("SigningKeys", "signing_keys", SigningKeys, SigningKeysKey, Owner.CALLER),
)

KIND_OF_KEY: Mapping[type, RowKind] = {kind.key_type: kind for kind in ROW_KINDS}
KIND_OF_ROW: Mapping[type, RowKind] = {kind.row_type: kind for kind in ROW_KINDS}
KINDS_OF_RUN = tuple(kind for kind in ROW_KINDS if kind.owner is Owner.RUN)


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


class OpenQueue(msgspec.Struct, frozen=True):
    """Creates the queue of a new run: with the change if the engine can, else right after it.

    Never before the change: a queue without the row of its run would not be found and removed.
    """

    run_id: RunId


class Enqueue(msgspec.Struct, frozen=True):
    """Refs to send to the queue of a run: with the change if the engine can, else right after."""

    refs: tuple[TaskRef, ...]


class Change(msgspec.Struct, frozen=True):
    """Writes that are executed in one transaction, and the effects that follow."""

    writes: tuple[Write, ...]
    effects: tuple[OpenQueue | Enqueue, ...] = ()


class SettleChange(Change, frozen=True):
    """A change of one task and of the counters of its shard, which must commit together.

    An engine may join the settles of one call: their counts are one write per counter row, and the
    returned counters are those after the whole call.
    """

    def __post_init__(self) -> None:
        # The counts of several settles are added up, so nothing but the state of the counter row
        # may decide about them.
        assert len(self.writes) == 2
        assert not self.effects
        count = self.count
        assert not count.values
        gate = count.guard
        assert not gate.equals
        assert gate.lapsed is None
        assert gate.at_least is None

    @property
    def flip(self) -> Update:
        """The write that changes the task."""
        write = self.writes[0]
        assert isinstance(write, Update)
        return write

    @property
    def count(self) -> Update:
        """The write that adds to the counters."""
        write = self.writes[1]
        assert isinstance(write, Update)
        return write


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


def holds(guard: Guard, row: Row) -> bool:
    """Returns whether a row passes a guard. An empty field is before no time and is no number."""
    if guard.status_in is not None and cast("Any", row).status not in guard.status_in:
        return False
    if any(getattr(row, name) != value for name, value in guard.equals):
        return False
    if guard.at_least is not None:
        count = getattr(row, guard.at_least[0])
        if count is None or count < guard.at_least[1]:
            return False
    if guard.lapsed is None:
        return True
    at = getattr(row, guard.lapsed[0])
    return at is not None and bool(at < guard.lapsed[1])


def find_refusal(
    writes: Sequence[Write], rows: Mapping[AnyKey, Row | None]
) -> Stale | Missing | None:
    """Returns why these writes are refused, given the current rows; None if all guards hold.

    Missing outranks Stale: a caller can decide again on a stale row, but not without a row.
    """
    refusals = [
        refusal for write in writes if (refusal := _refusal(write, rows.get(write.key))) is not None
    ]
    missing = (refusal for refusal in refusals if isinstance(refusal, Missing))
    return next(missing, next(iter(refusals), None))


def _refusal(write: Write, row: Row | None) -> Stale | Missing | None:
    match write:
        case Insert():
            replaces_before = write.over_expired_at
            fits = row is None or (
                replaces_before is not None
                and holds(Guard(lapsed=("expires_at", replaces_before)), row)
            )
        case Update():
            if row is None:
                return Missing(write.key)
            # The default that replaces a damaged field may pass the guard although the stored
            # value did not. The row is Stale in any case.
            fits = holds(write.guard, row) and not isinstance(row, DamagedTask)
        case Delete():
            fits = row is None or holds(write.guard, row)
        case _:
            assert_never(write)
    return None if fits else Stale(write.key, row)


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

    @property
    def fence(self) -> Guard:
        """The batch is still at this step, and still belongs to this worker."""
        return Guard(equals=(("epoch", self.epoch), ("done", self.done_before)))

    @property
    def checkpoint(self) -> Update:
        return Update(self.key, self.fence, values=self.values)

    def count_updates(self, stats: Mapping[int, dict[str, int]] | None = None) -> list[Update]:
        """Returns the updates of the counter rows, for `stats` or all counts of the step.

        Their guard is the gate: the counter rows of an ended run accept no more tasks.
        """
        gate = Guard(status_in=self.gate_in)
        counts = self.stats if stats is None else stats
        return [
            Update(StatsKey(self.key.job_id, self.key.run_id, shard), gate, deltas=deltas)
            for shard, deltas in sorted(counts.items())
        ]
