"""Two stores: what is where if tasks have a store of their own, and how a change is written that
crosses from one store into the other (docs/decisions/0037-tasks-in-a-store-of-their-own.md).

The task store has the rows that change with every task, and the event log. The record store has all
others. A change of rows of one store is one transaction of that store. These cross:

- A change of a job or a run that also creates, drains or closes counters, or reports an event: the
  record store first. Its rows decide: a job that is deleted, or a run that is stopping, refuses.
  What follows in the task store cannot be refused any more. It is stored as a `Crossing` in the
  transaction that decides, written to the task store once, and then forgotten. The other order
  could drain the counters of a run that goes on, or report an event that never happened.
- A step of an ingest: the task store first. The counts of a task are one transaction with its
  insert, so repeating a step counts nothing twice, however long it is. The checkpoint comes last,
  because everything before it is repeated if the step is interrupted. In the other order, tasks
  would be lost behind the checkpoint.
- A deletion: the task store first, for the same reason. Only the rows of runs name the tasks of a
  job.

A job has one crossing at a time, so second parts are written in the order in which their first
parts were decided. Each of these finishes an unfinished crossing that it meets: the next change of
the job that crosses, a step that is refused, a deletion, a reader that relies on it, and, if none
comes, every worker once in a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, assert_never, get_type_hints

import msgspec

from conveyor.domain.changes import (
    KIND_OF_KEY,
    ROW_KINDS,
    AnyKey,
    Change,
    Chunk,
    CrossingKey,
    Delete,
    EventKey,
    FeedKey,
    Guard,
    Insert,
    RecordKey,
    RowKind,
    StatsKey,
    TaskKey,
    Update,
    Write,
)
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.lifecycle import accepts_settles
from conveyor.domain.model import Crossing, IdempotencyRecord, Run
from conveyor.domain.queries import EventsOf, StatsOf, TasksAt, TasksOf, UnplacedEvents
from conveyor.domain.submit.admission import counts_of

# Together with the events, the row that numbers them: each number is one change of both.
_TASK_STORE_KEYS = frozenset({TaskKey, StatsKey, EventKey, FeedKey})
TASK_STORE_QUERIES = (TasksOf, TasksAt, StatsOf, EventsOf, UnplacedEvents)
# How long the task store remembers that a second part was written. A process that was held up for
# longer than this between reading a crossing and writing it could write it again.
_REMEMBERED_S = 86_400.0
_KINDS = {kind.name: kind for kind in ROW_KINDS}


class Place(Enum):
    """Which store the rows of a change are in."""

    RECORDS = "records"
    TASKS = "tasks"
    BOTH = "both"


def is_in_task_store(key: AnyKey) -> bool:
    return type(key) in _TASK_STORE_KEYS


def place_of(change: Change) -> Place:
    places = {is_in_task_store(write.key) for write in change.writes}
    if len(places) == 2:
        return Place.BOTH
    return Place.TASKS if True in places else Place.RECORDS


def job_of(change: Change) -> JobId:
    """Returns the job whose crossings are written one after the other."""
    for write in change.writes:
        if (job_id := getattr(write.key, "job_id", None)) is not None:
            return JobId(job_id)
    # Rows of a caller: the first key of the change takes the place of its job.
    key = change.writes[0].key
    return JobId("#".join([KIND_OF_KEY[type(key)].name, *map(str, msgspec.structs.astuple(key))]))


class Parts(msgspec.Struct, frozen=True):
    """A change that crosses, in two parts. `crossing` contains the second part."""

    first: Change
    second: tuple[Write, ...]
    crossing: Crossing


def split(change: Change, *, token: str, now: float) -> Parts:
    """Splits a change. The first part decides, and stores the second with its decision."""
    assert place_of(change) is Place.BOTH
    first = [write for write in change.writes if not is_in_task_store(write.key)]
    second = tuple(write for write in change.writes if is_in_task_store(write.key))
    job_id = job_of(change)
    crossing = Crossing(job_id, token, made_at=now, writes=_to_json(second))
    # The insert is last, so that a reason to refuse the change itself is found before it.
    return Parts(Change((*first, Insert(CrossingKey(job_id), crossing))), second, crossing)


def completion(crossing: Crossing) -> Change:
    """Returns the second part, with a mark that makes it happen once.

    It has no guards: the first part has decided, and later changes of the job wait for this one.
    """
    return Change((*_from_json(crossing.writes), Insert(mark_key(crossing), _mark(crossing))))


def mark_key(crossing: Crossing) -> RecordKey:
    return RecordKey(f"crossing/{crossing.token}")


def _mark(crossing: Crossing) -> IdempotencyRecord:
    return IdempotencyRecord(
        key_id=mark_key(crossing).key_id,
        caller=CallerId(""),
        fingerprint="",
        subject="",
        owner="",
        claimed_until=0.0,
        expires_at=crossing.made_at + _REMEMBERED_S,
    )


def without(change: Change, key: AnyKey) -> Change:
    """Leaves out the write of a row that is there already, or is gone: a deletion of the run has
    overtaken it."""
    return Change(tuple(write for write in change.writes if write.key != key))


def forget(crossing: Crossing) -> Change:
    """Removes a crossing whose second part is written, and no later one of the job."""
    guard = Guard(equals=(("token", crossing.token),))
    return Change((Delete(CrossingKey(crossing.job_id), guard),))


def relies_on_second(row: object) -> bool:
    """Whether a reader of this row relies on the second part of the change that it shows.

    No task of a run ends once the run is stopping, has ended or is deleted, and its totals are
    final: that is in its counters. All other second parts may be late: counters without a row are
    zero, and events are read in the order in which they are numbered.
    """
    return isinstance(row, Run) and not accepts_settles(row)


def task_inserts(chunk: Chunk) -> list[Change]:
    """Returns the inserts of a step, each with its own counts: the insert of a task counts it."""
    changes = []
    for task in chunk.tasks:
        key = TaskKey(chunk.key.job_id, task.run_id, task.task_id, task.shard)
        counts = chunk.count_updates(counts_of([task]))
        quiet = [msgspec.structs.replace(count, is_quiet=True) for count in counts]
        changes.append(Change((Insert(key, task), *quiet)))
    return changes


# Second parts as JSON. Guards are left out: they have been decided.


class _StoredWrite(msgspec.Struct, frozen=True, omit_defaults=True):
    """A write: of a whole row, of some of its fields, or its removal if it has neither."""

    kind: str
    key: dict[str, Any]
    row: msgspec.Raw = msgspec.Raw()
    values: dict[str, Any] = {}
    deltas: dict[str, int] = {}
    is_quiet: bool = False


def _to_json(writes: Sequence[Write]) -> str:
    return msgspec.json.encode([_to_stored(write) for write in writes]).decode()


def _to_stored(write: Write) -> _StoredWrite:
    kind, key = KIND_OF_KEY[type(write.key)].name, msgspec.structs.asdict(write.key)
    match write:
        case Insert():
            return _StoredWrite(kind, key, row=msgspec.Raw(msgspec.json.encode(write.row)))
        case Update():
            return _StoredWrite(
                kind, key, values=write.values, deltas=write.deltas, is_quiet=write.is_quiet
            )
        case Delete():
            return _StoredWrite(kind, key)
        case _:
            assert_never(write)


def _from_json(text: str) -> list[Write]:
    stored = msgspec.json.decode(text, type=list[_StoredWrite])
    return [_from_stored(write, _KINDS[write.kind]) for write in stored]


def _from_stored(stored: _StoredWrite, kind: RowKind) -> Write:
    key = msgspec.convert(stored.key, kind.key_type)
    if bytes(stored.row):
        row: Any = msgspec.json.decode(stored.row, type=kind.row_type)
        return Insert(key, row)
    if not stored.values and not stored.deltas:
        return Delete(key)
    types = get_type_hints(kind.row_type)
    values = {name: msgspec.convert(value, types[name]) for name, value in stored.values.items()}
    return Update(key, Guard(), values, stored.deltas, stored.is_quiet)
