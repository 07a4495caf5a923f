"""Row mapping: converts the model's values to SQLite's and back, derived from the types
(docs/engines.md, Embedded engine).

Strings, numbers and instants are stored unchanged, enums as their text, booleans as 0 and 1, and
composite values as JSON. The mapping of a type is computed once, at import. A claim decodes its
task in about 4 us.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

from conveyor.domain.backpressure.budget import Budget, BudgetReservation
from conveyor.domain.changes import (
    AnyKey,
    BatchKey,
    BudgetKey,
    EventKey,
    ExportKey,
    FeedKey,
    InputKey,
    JobKey,
    NoticeKey,
    RecordKey,
    RunKey,
    ScheduleKey,
    ScrubKey,
    ShareKey,
    SigningKeysKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.damage import UNREADABLE, salvage_task
from conveyor.domain.export.export import Export
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
)
from conveyor.domain.schedule.schedule import Schedule
from conveyor.ports.errors import RowDamaged

Convert = Callable[[Any], Any]
Values = Sequence[Any]

_PLAIN = frozenset({str, int, float})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """The mapping of one row type. `columns` are the fields of the type, in their order.

    Only fields that need a conversion have an encoder and a decoder. None is stored as NULL.
    """

    name: str
    row_type: type[msgspec.Struct]
    key_columns: tuple[str, ...]
    key_values: Callable[[Any], Any]
    columns: tuple[str, ...]
    encoders: dict[str, Convert]
    encoders_at: tuple[tuple[int, Convert], ...]
    decoders_at: tuple[tuple[int, Convert], ...]

    def to_row(self, value: msgspec.Struct) -> Values:
        values = list(msgspec.structs.astuple(value))
        for at, encode in self.encoders_at:
            if values[at] is not None:
                values[at] = encode(values[at])
        return values

    def from_row(self, row: Values) -> Any:
        """Decodes a row. A task with undecodable fields becomes a DamagedTask.

        Any other undecodable row raises RowDamaged.
        """
        # Positions instead of names, and only the columns with a decoder: every claim and settle
        # passes here.
        values = list(row)
        try:
            for at, decode in self.decoders_at:
                if values[at] is not None:
                    values[at] = decode(values[at])
        except UNREADABLE as error:
            return self._salvage(row, error)
        return self.row_type(*values)

    def from_bytes(self, row: Values) -> Any:
        """Decodes a row whose texts were read as bytes, because one of them is not UTF-8."""
        texts = [_to_text(value) for value in row]
        if bytes not in map(type, texts):
            return self.from_row(texts)
        return self._salvage(texts, ValueError("a text is no UTF-8"))

    def _salvage(self, row: Values, cause: Exception) -> Any:
        decoders = dict(self.decoders_at)
        readable: dict[str, Any] = {}
        damaged: list[str] = []
        for at, (name, value) in enumerate(zip(self.columns, row, strict=True)):
            try:
                if isinstance(value, bytes):
                    damaged.append(name)
                elif value is None or at not in decoders:
                    readable[name] = value
                else:
                    readable[name] = decoders[at](value)
            except UNREADABLE:
                damaged.append(name)
        task = salvage_task(readable, damaged) if self.row_type is Task else None
        if task is None:
            address = "/".join(str(readable.get(name, "?")) for name in self.key_columns)
            raise RowDamaged(self.name, address, str(cause)) from cause
        return task

    def to_column(self, name: str, value: Any) -> Any:
        encode = self.encoders.get(name)
        return value if encode is None or value is None else encode(value)

    def address(self, key: AnyKey) -> tuple[Any, ...]:
        address: tuple[Any, ...] = self.key_values(key)
        return address


def _table(name: str, row_type: type[msgspec.Struct], *key_columns: str) -> Table:
    hints = get_type_hints(row_type)
    columns = row_type.__struct_fields__
    coders = {name: pair for name in columns if (pair := _coders(hints[name])) is not None}
    return Table(
        name=name,
        row_type=row_type,
        key_columns=key_columns,
        key_values=_getter(key_columns),
        columns=columns,
        encoders={name: encode for name, (encode, _) in coders.items()},
        encoders_at=tuple((columns.index(name), encode) for name, (encode, _) in coders.items()),
        decoders_at=tuple((columns.index(name), decode) for name, (_, decode) in coders.items()),
    )


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads these fields as a tuple, even if there is only one."""
    if len(names) == 1:
        (name,) = names
        return lambda value: (getattr(value, name),)
    return attrgetter(*names)


def _coders(hint: Any) -> tuple[Convert, Convert] | None:
    kind = _bare(hint)
    if kind in _PLAIN:
        return None
    if kind is bool:
        return int, bool
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        # A dict lookup is faster than the call of the enum class.
        members = {str(member): member for member in kind}
        return str.__str__, members.__getitem__
    return _to_json, msgspec.json.Decoder(kind).decode


def _bare(hint: Any) -> Any:
    """Returns the type without None, and the base type of a NewType."""
    if get_origin(hint) in {Union, types.UnionType}:
        rest = [each for each in get_args(hint) if each is not types.NoneType]
        return _bare(rest[0]) if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007
    return hint.__supertype__ if isinstance(hint, NewType) else hint


def _to_text(value: Any) -> Any:
    """Decodes bytes as UTF-8, or returns them unchanged if they are not UTF-8."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


JOBS = _table("jobs", Job, "job_id")
RUNS = _table("runs", Run, "job_id", "run_id")
BATCHES = _table("batches", Batch, "job_id", "run_id", "batch_id")
STATS = _table("stats", ShardCounters, "job_id", "run_id", "shard")
TASKS = _table("tasks", Task, "run_id", "task_id")  # A task row has no job id.
RECORDS = _table("key_records", IdempotencyRecord, "key_id")
NOTICES = _table("notices", Notice, "notice_id")
SCRUBS = _table("scrubs", DeletionIntent, "scrub_id")
EVENTS = _table("events", Event, "caller", "event_id")
FEEDS = _table("feeds", EventSequence, "caller")
SIGNING_KEYS = _table("signing_keys", SigningKeys, "caller")
SCHEDULES = _table("schedules", Schedule, "job_id")
EXPORTS = _table("exports", Export, "job_id", "run_id", "export_id")
INPUTS = _table("job_inputs", JobInput, "input_id")
BUDGETS = _table("budgets", Budget, "job_id", "run_id")
SHARES = _table("shares", BudgetReservation, "job_id", "run_id", "holder")

TABLES: dict[type, Table] = {
    JobKey: JOBS,
    RunKey: RUNS,
    BatchKey: BATCHES,
    StatsKey: STATS,
    TaskKey: TASKS,
    RecordKey: RECORDS,
    NoticeKey: NOTICES,
    ScrubKey: SCRUBS,
    EventKey: EVENTS,
    FeedKey: FEEDS,
    SigningKeysKey: SIGNING_KEYS,
    ScheduleKey: SCHEDULES,
    ExportKey: EXPORTS,
    InputKey: INPUTS,
    BudgetKey: BUDGETS,
    ShareKey: SHARES,
}
