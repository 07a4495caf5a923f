"""Transaction: decides changes on rows that are locked, and collects what must be written
(docs/engines.md, Postgres engine)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never, cast

import msgspec

from conveyor.domain.changes import (
    KIND_OF_KEY,
    ROW_KINDS,
    AnyKey,
    Applied,
    Change,
    Delete,
    Guard,
    Insert,
    Missing,
    OpenQueue,
    Row,
    RunKey,
    SettleChange,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
    Write,
    find_refusal,
)
from conveyor.domain.damage import DamagedTask
from conveyor.domain.ids import RunId
from conveyor.domain.model import Run, TaskRef
from conveyor.engines.postgres import sql
from conveyor.engines.postgres.connection import Answer, Statement
from conveyor.engines.postgres.queue import open_queues, send
from conveyor.engines.postgres.sql import TABLES
from conveyor.engines.postgres.task_tables import SHARED, creation_of
from conveyor.engines.sql_mapping import Table

_ORDER = {kind.key_type: number for number, kind in enumerate(ROW_KINDS)}
_Address = tuple[type, tuple[Any, ...]]


def lock_statements(keys: Sequence[AnyKey], places: Mapping[RunId, str]) -> list[Statement]:
    """Returns what locks and reads the rows with these keys, in an order that is the same for all
    transactions: by kind, then by key."""
    tasks: dict[RunId, list[str]] = {}
    counters: dict[tuple[str, str], list[int]] = {}
    others: list[AnyKey] = []
    for key in keys:
        if isinstance(key, TaskKey):
            tasks.setdefault(key.run_id, []).append(key.task_id)
        elif isinstance(key, StatsKey):
            counters.setdefault((key.job_id, key.run_id), []).append(key.shard)
        else:
            others.append(key)
    others.sort(key=lambda key: (_ORDER[type(key)], _address(key)[1]))
    return [
        *(sql.lock_tasks(places[run_id], run_id, tasks[run_id]) for run_id in sorted(tasks)),
        *(sql.lock_counters(*run, counters[run], TABLES[StatsKey]) for run in sorted(counters)),
        *map(sql.lock_row, others),
    ]


class Transaction:
    """The rows of all changes of a group. `decide` changes them here; `statements` writes them."""

    def __init__(
        self, keys: Sequence[AnyKey], answers: Sequence[Answer], places: Mapping[RunId, str]
    ) -> None:
        self._places = places
        self._stored: dict[_Address, Sequence[Any]] = {}
        self._before: dict[_Address, Row] = {}
        for answer, key_type in zip(answers, _types_in_order(keys), strict=True):
            table = TABLES[key_type]
            for stored in answer.rows:
                row = table.from_row(stored)
                address = key_type, table.key_values(row)
                self._before[address] = row
                self._stored[address] = stored
        self._rows: dict[_Address, Row] = dict(self._before)
        self._changed: dict[_Address, set[str]] = {}
        self._refs: list[TaskRef] = []
        self._queues: dict[RunId, None] = {}

    @property
    def new_run_ids(self) -> list[RunId]:
        return [row.run_id for row in self._inserted(RunKey) if isinstance(row, Run)]

    def decide(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts = [self._apply(change) for change in changes]
        if all(isinstance(change, SettleChange) for change in changes):
            return list(map(self._with_counters, changes, verdicts))
        return verdicts

    def _apply(self, change: Change) -> Verdict:
        refusal = self._refusal(change.writes)
        if refusal is not None:
            return refusal
        rows = tuple([self._write(write) for write in change.writes])
        for effect in change.effects:
            if isinstance(effect, OpenQueue):
                self._queues[effect.run_id] = None
            else:
                self._refs += effect.refs
                self._queues.update(dict.fromkeys(ref.run_id for ref in effect.refs))
        return Applied(rows)

    def _with_counters(self, change: Change, verdict: Verdict) -> Verdict:
        """Replaces the counters of a settle by those after the whole call."""
        assert isinstance(change, SettleChange)
        if not isinstance(verdict, Applied) or change.count.is_quiet:
            return verdict
        return Applied((verdict.rows[0], self._rows[_address(change.count.key)]))

    def first_row_only(self, verdict: Verdict) -> Verdict:
        return Applied(verdict.rows[:1]) if isinstance(verdict, Applied) else verdict

    def _refusal(self, writes: Sequence[Write]) -> Stale | Missing | None:
        rows = {write.key: self._rows.get(_address(write.key)) for write in writes}
        assert len(rows) == len(writes), "two writes to one row in one change"
        if not any(isinstance(row, DamagedTask) for row in rows.values()):
            return find_refusal(writes, rows)
        # The placeholders of a damaged row say nothing about its guard, so the stored values
        # decide.
        refusals = [
            refusal
            for write in writes
            if not (isinstance(rows[write.key], DamagedTask) and self._holds_stored(write))
            and (refusal := find_refusal([write], rows)) is not None
        ]
        missing = (refusal for refusal in refusals if isinstance(refusal, Missing))
        return next(missing, next(iter(refusals), None))

    def _holds_stored(self, write: Write) -> bool:
        address = _address(write.key)
        table = TABLES[type(write.key)]
        if isinstance(write, Insert) or address not in self._stored:
            return False
        values = dict(zip(table.columns, self._stored[address], strict=True))
        return _holds(write.guard, values, table)

    def _write(self, write: Write) -> Row | None:
        address = _address(write.key)
        match write:
            case Insert():
                self._rows[address] = write.row
                # Replaces an expired row as a whole.
                self._changed.setdefault(address, set()).update(TABLES[address[0]].columns)
            case Update():
                self._update(address, write)
            case Delete():
                self._rows.pop(address, None)
            case _:
                assert_never(write)
        return None if isinstance(write, Update) and write.is_quiet else self._rows.get(address)

    def _update(self, address: _Address, write: Update) -> None:
        assert not write.values.keys() & write.deltas.keys()
        old = self._rows[address]
        sums = {name: getattr(old, name) + delta for name, delta in write.deltas.items()}
        values = {**write.values, **sums}
        if isinstance(old, DamagedTask):
            # This change replaces the damaged values of the fields that it writes.
            values["damaged"] = tuple(name for name in old.damaged if name not in values)
        self._rows[address] = msgspec.structs.replace(old, **values)
        self._changed.setdefault(address, set()).update(write.values, write.deltas)

    def statements(self, now: float | None) -> list[Statement]:
        """Returns what writes the rows, and sends the references of applied changes."""
        statements: list[Statement] = []
        for key_type in map(_key_type, ROW_KINDS):
            inserted = self._inserted(key_type)
            for place, rows in self._by_place(key_type, inserted).items():
                table = TABLES[key_type]
                statements.append(sql.insert_rows(table, place.removeprefix("ONLY "), rows))
            if key_type is RunKey:
                for run in cast("list[Run]", inserted):
                    statements += creation_of(run.job_id, run.run_id, run.planned)
            statements += self._updates(key_type)
            statements += self._deletes(key_type)
        if self._queues:
            statements.append(open_queues(list(self._queues)))
        return statements + send(self._refs, now)

    def _inserted(self, key_type: type) -> list[Row]:
        return [
            row
            for address, row in self._rows.items()
            if address[0] is key_type and address not in self._before
        ]

    def _by_place(self, key_type: type, rows: Sequence[Row]) -> dict[str, list[Row]]:
        by_place: dict[str, list[Row]] = {}
        for row in rows:
            by_place.setdefault(self._place(key_type, row), []).append(row)
        return by_place

    def _place(self, key_type: type, row: Any) -> str:
        if key_type is TaskKey:
            return self._places.get(row.run_id, SHARED)
        return TABLES[key_type].name

    def _updates(self, key_type: type) -> list[Statement]:
        """Returns one statement for all rows of a table of which the same columns changed."""
        shapes: dict[tuple[str, tuple[str, ...]], list[_Address]] = {}
        table = TABLES[key_type]
        for address, names in self._changed.items():
            if address[0] is not key_type or address not in self._before:
                continue
            if address in self._rows:
                changed = tuple(name for name in table.columns if name in names)
                changed = tuple(name for name in changed if name not in table.key_columns)
                place = self._place(key_type, self._rows[address])
                if changed:
                    shapes.setdefault((place, changed), []).append(address)
        return [
            sql.update_rows(
                table,
                place,
                [address[1] for address in addresses],
                names,
                [self._rows[address] for address in addresses],
            )
            for (place, names), addresses in shapes.items()
        ]

    def _deletes(self, key_type: type) -> list[Statement]:
        table = TABLES[key_type]
        return [
            sql.delete_row(table, address[1], self._place(key_type, row))
            for address, row in self._before.items()
            if address[0] is key_type and address not in self._rows
        ]


def _types_in_order(keys: Sequence[AnyKey]) -> list[type]:
    """Returns the kind of row that each of the `lock_statements` reads."""
    runs = {key.run_id for key in keys if isinstance(key, TaskKey)}
    counters = {(key.job_id, key.run_id) for key in keys if isinstance(key, StatsKey)}
    others = [type(key) for key in keys if not isinstance(key, TaskKey | StatsKey)]
    return [
        *[TaskKey for _ in runs],
        *[StatsKey for _ in counters],
        *sorted(others, key=lambda key_type: _ORDER[key_type]),
    ]


def _holds(guard: Guard, values: Mapping[str, Any], table: Table) -> bool:
    """Returns whether stored values pass a guard."""
    if guard.status_in is not None and values["status"] not in guard.status_in:
        return False
    if any(values[name] != table.to_column(name, value) for name, value in guard.equals):
        return False
    for fact, is_below in ((guard.lapsed, True), (guard.at_least, False)):
        if fact is None:
            continue
        name, bound = fact
        value = values[name]
        if value is None or (value < bound) != is_below:
            return False
    return True


def _address(key: AnyKey) -> _Address:
    return type(key), KIND_OF_KEY[type(key)].address_of(key)


def _key_type(kind: Any) -> type:
    key_type: type = kind.key_type
    return key_type
