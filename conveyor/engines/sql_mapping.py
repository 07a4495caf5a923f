"""What engines on SQL databases share: the mapping of rows to columns, and the queries as SQL
(docs/engines.md, Embedded engine; docs/storage.md, Queries).

Strings, numbers and instants are stored unchanged, enums as their text, booleans as the database
has them, and composite values as JSON. The mapping is derived from the types of the fields, once,
at import. A claim decodes its task in about 4 us.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import (
    Any,
    NamedTuple,
    NewType,
    Union,
    assert_never,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from conveyor.domain.changes import (
    ROW_KINDS,
    AnyKey,
    BatchKey,
    CrawlKey,
    CrawlStepKey,
    CrossingKey,
    EventKey,
    ExportKey,
    InputKey,
    JobKey,
    NoticeKey,
    RowKind,
    RunKey,
    SampleKey,
    ScheduleKey,
    ScrubKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.damage import UNREADABLE, salvage_task
from conveyor.domain.model import Task
from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    CrawlStepsOf,
    DueCrawls,
    DueExpiries,
    DueExports,
    DueNotices,
    DueSchedules,
    DueScrubs,
    EventsOf,
    ExpiredInputs,
    JobsOf,
    NoticesOf,
    RunsIn,
    RunsOf,
    SamplesOf,
    StatsOf,
    TasksAt,
    TasksOf,
    UnfinishedCrossings,
    UnplacedEvents,
)
from conveyor.ports.errors import RowDamaged

Convert = Callable[[Any], Any]
Values = Sequence[Any]

# The types that every SQL database stores unchanged.
PLAIN = frozenset({str, int, float})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """The mapping of one row type. `columns` are the fields of the type, in their order, and
    `stored_types` the types of their stored values.

    Only fields that need a conversion have an encoder and a decoder. None is stored as NULL.
    """

    name: str
    row_type: type[msgspec.Struct]
    key_columns: tuple[str, ...]
    key_values: Callable[[Any], Any]
    columns: tuple[str, ...]
    stored_types: tuple[type, ...]
    encoders: dict[str, Convert]
    encoders_at: tuple[tuple[int, Convert], ...]
    decoders_at: tuple[tuple[int, Convert], ...]

    def to_row(self, value: msgspec.Struct) -> Values:
        values = list(msgspec.structs.astuple(value))
        for at, encode in self.encoders_at:
            if values[at] is not None:
                values[at] = encode(values[at])
        return values

    def to_columns(self, values: Sequence[msgspec.Struct]) -> list[Sequence[Any]]:
        """Returns the rows of these values as columns."""
        columns: list[Sequence[Any]] = list(zip(*map(msgspec.structs.astuple, values), strict=True))
        for at, encode in self.encoders_at:
            columns[at] = [None if value is None else encode(value) for value in columns[at]]
        return columns

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


def make_tables(plain: Set[type] = PLAIN) -> dict[type, Table]:
    """Returns the mapping of each row kind by the type of its keys. Values of the `plain` types are
    stored unchanged."""
    return {kind.key_type: _table(kind, plain) for kind in ROW_KINDS}


def _table(kind: RowKind, plain: Set[type]) -> Table:
    hints = get_type_hints(kind.row_type)
    columns = kind.row_type.__struct_fields__
    coders = {
        name: pair for name in columns if (pair := _coders(_bare(hints[name]), plain)) is not None
    }
    return Table(
        name=kind.table,
        row_type=kind.row_type,
        key_columns=kind.key_fields,
        key_values=_getter(kind.key_fields),
        columns=columns,
        stored_types=tuple(_stored_type(_bare(hints[name]), plain) for name in columns),
        encoders={name: encode for name, (encode, _) in coders.items()},
        encoders_at=tuple((columns.index(name), encode) for name, (encode, _) in coders.items()),
        decoders_at=tuple((columns.index(name), decode) for name, (_, decode) in coders.items()),
    )


def _stored_type(kind: Any, plain: Set[type]) -> type:
    if kind in plain:
        plain_type: type = kind
        return plain_type
    return int if kind is bool else str


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads these fields as a tuple, even if there is only one."""
    if len(names) == 1:
        (name,) = names
        return lambda value: (getattr(value, name),)
    return attrgetter(*names)


def _coders(kind: Any, plain: Set[type]) -> tuple[Convert, Convert] | None:
    if kind in plain:
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
        rest = [argument for argument in get_args(hint) if argument is not types.NoneType]
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


# Queries as SQL, each in the order that it promises. Parameters are marked by `?`. An engine whose
# database marks them otherwise replaces the marks: no text contains a `?` for another reason.

_Term = tuple[str, Any]


class Plan(NamedTuple):
    """A query in SQL. Without a limit, the caller needs every row of a run: counters and batches,
    whose sum would be wrong if one were missing."""

    key_type: type
    where: str
    parameters: list[Any]
    order: str
    limit: int | None


def plan_of(query: AnyQuery) -> Plan:
    key_type, terms, order, limit = _plan(query)
    where = " AND ".join(term for term, _ in terms)
    return Plan(key_type, where, [value for _, values in terms for value in values], order, limit)


def _plan(query: AnyQuery) -> tuple[type, list[_Term], str, int | None]:  # noqa: C901, PLR0912 (one branch a kind)
    match query:
        case TasksOf():
            return TaskKey, _tasks_of(query), "task_id", query.limit
        case TasksAt():
            raise AssertionError("read by key")
        case StatsOf():
            return StatsKey, _in_run(query), "shard", None
        case JobsOf():
            return JobKey, _jobs_of(query), "job_id DESC", query.limit
        case RunsOf():
            return RunKey, _runs_of(query), "sequence DESC", query.limit
        case BatchesOf():
            return BatchKey, _in_run(query), "created_at, batch_id", None
        case SamplesOf():
            return SampleKey, _in_run(query), "minute", query.limit
        case RunsIn():
            return RunKey, _runs_in(query), "run_id", query.limit
        case BatchesIn():
            terms = [_status_in(query.statuses), ("updated_at <= ?", [query.idle_since])]
            return BatchKey, terms, "updated_at, run_id, batch_id", query.limit
        case DueNotices():
            terms = [_status_in(query.statuses), ("due_at <= ?", [query.due_by])]
            return NoticeKey, terms, "due_at, notice_id", query.limit
        case NoticesOf():
            order = "run_id DESC, occurred_at DESC, notice_id DESC"
            return NoticeKey, _notices_of(query), order, query.limit
        case DueScrubs():
            return ScrubKey, [("due_at <= ?", [query.due_by])], "due_at, scrub_id", query.limit
        case UnfinishedCrossings():
            return CrossingKey, [("TRUE", [])], "made_at, job_id", query.limit
        case EventsOf():
            terms = [("caller = ?", [query.caller]), ("seq > 0 AND seq > ?", [query.after])]
            return EventKey, terms, "seq", query.limit
        case UnplacedEvents():
            terms = [("seq = 0 AND occurred_at < ?", [query.before])]
            return EventKey, terms, "occurred_at, event_id", query.limit
        case DueSchedules():
            return ScheduleKey, _due_schedules(query), "next_fire_at, job_id", query.limit
        case DueExports():
            return ExportKey, [("due_at <= ?", [query.due_by])], "due_at, export_id", query.limit
        case DueExpiries():
            return RunKey, [("sweep_at <= ?", [query.due_by])], "sweep_at, run_id", query.limit
        case ExpiredInputs():
            terms = [("expires_at <= ?", [query.expired_by])]
            return InputKey, terms, "expires_at, input_id", query.limit
        case DueCrawls():
            return CrawlKey, [("due_at <= ?", [query.due_by])], "due_at, job_id", query.limit
        case CrawlStepsOf():
            terms = [*_in_run(query), ("number >= ?", [query.first])]
            return CrawlStepKey, terms, "number", query.limit
        case _:
            assert_never(query)


def _tasks_of(query: TasksOf) -> list[_Term]:
    terms: list[_Term] = [("run_id = ?", [query.run_id]), ("task_id > ?", [query.after or ""])]
    if query.statuses is not None:
        terms.append(_status_in(query.statuses))
    if query.have_problems:  # This term selects the partial index of tasks with problems.
        terms.append(("problem IS NOT NULL", []))
    return terms


def _jobs_of(query: JobsOf) -> list[_Term]:
    terms: list[_Term] = [("caller = ?", [query.caller]), _status_in(query.statuses)]
    if query.type is not None:
        terms.append(("type = ?", [str(query.type)]))
    if query.external_id is not None:
        terms.append(("external_id = ?", [query.external_id]))
    if query.before is not None:
        terms.append(("job_id < ?", [query.before]))
    return terms


def _runs_of(query: RunsOf) -> list[_Term]:
    terms: list[_Term] = [("job_id = ?", [query.job_id]), _status_in(query.statuses)]
    if query.before is not None:
        terms.append(("sequence < ?", [query.before]))
    return terms


def _runs_in(query: RunsIn) -> list[_Term]:
    terms = [_status_in(query.statuses), ("updated_at >= ?", [query.updated_since])]
    if query.after is not None:
        terms.append(("run_id > ?", [query.after]))
    return terms


def _notices_of(query: NoticesOf) -> list[_Term]:
    terms: list[_Term] = [("job_id = ?", [query.job_id])]
    if query.run_id is not None:
        terms.append(("run_id = ?", [query.run_id]))
    if query.before is not None:
        terms.append(("(run_id, occurred_at, notice_id) < (?, ?, ?)", query.before))
    return terms


def _due_schedules(query: DueSchedules) -> list[_Term]:
    terms = [_status_in(query.statuses), ("next_fire_at <= ?", [query.due_by])]
    if query.after is not None:
        terms.append(("(next_fire_at, job_id) > (?, ?)", [*query.after]))
    return terms


def _in_run(query: StatsOf | BatchesOf | SamplesOf | CrawlStepsOf) -> list[_Term]:
    return [("job_id = ?", [query.job_id]), ("run_id = ?", [query.run_id])]


def _status_in(statuses: Collection[str]) -> _Term:
    if not statuses:  # PostgreSQL has no empty list.
        return "FALSE", []
    marks = ", ".join("?" * len(statuses))
    return f"status IN ({marks})", [str.__str__(status) for status in statuses]


def split_damaged(rows: Iterator[Any]) -> tuple[list[Any], list[RowDamaged]]:
    """Returns the rows that can be decoded, and the errors of those that cannot."""
    good: list[Any] = []
    damages: list[RowDamaged] = []
    while True:
        try:
            good.extend(rows)
        except RowDamaged as error:
            damages.append(error)
        else:
            return good, damages
