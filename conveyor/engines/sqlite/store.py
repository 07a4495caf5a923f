"""SqliteStore: applies each change, with its effects, as one step of a transaction
(docs/engines.md).

A write is one statement that contains its guard and returns its row. Only after a refusal does the
store read the row to find the reason. A change of several writes runs inside a savepoint, and a
refused write rolls back to it. The alternative, to check all guards before the first write, takes
longer (a settle: 65 us with the savepoint, 70 us with the checks).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never, cast

from conveyor.domain.changes import (
    ANY,
    KIND_OF_KEY,
    KINDS_OF_RUN,
    ROW_KINDS,
    AnyKey,
    Applied,
    Change,
    Chunk,
    Delete,
    Expiry,
    Guard,
    Insert,
    Key,
    Missing,
    OpenQueue,
    R,
    Row,
    SettleChange,
    Stale,
    TaskKey,
    Update,
    Verdict,
    Write,
    find_refusal,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.queries import (
    AnyQuery,
    Q,
    Query,
    TaskPage,
    TasksAt,
    TasksOf,
    page_of,
)
from conveyor.engines.sql_mapping import plan_of, split_damaged
from conveyor.engines.sqlite import sql
from conveyor.engines.sqlite.database import Database
from conveyor.engines.sqlite.disk_space import Space
from conveyor.engines.sqlite.queue import enqueue, open_queue
from conveyor.engines.sqlite.sql import TABLES, columns_sql, fetch
from conveyor.ports.clock import Clock
from conveyor.ports.errors import RowDamaged
from conveyor.ports.store import DamageLog

# The time between two calls of `Database.tidy`. Space of deleted rows is returned within a minute.
_TIDY_S = 10.0
# Rows removed per transaction: about 5 ms of the Trio thread, during which no other task runs.
_SLICE_ROWS = 500

# Task rows have no job id, so the rows of a job's tasks are found by its runs.
_TASKS_OF_JOB = "run_id IN (SELECT run_id FROM runs WHERE job_id = :job)"
_TASKS = TABLES[TaskKey]


class SqliteStore:
    def __init__(self, database: Database, clock: Clock, space: Space) -> None:
        self._database = database
        self._clock = clock
        self._space = space
        self._tidied_at = 0.0
        self._damage = DamageLog()

    async def read(self, key: Key[R]) -> R | None:
        def op(connection: sqlite3.Connection) -> Any:
            return sql.select(connection, cast("AnyKey", key))

        return cast("R | None", await self._database.read_inline(op))

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        now = self._clock.steady()

        # Groups of settles wait up to 8 ms for a transaction to join. That delays no fetch
        # (decision 0012).
        settles = [change for change in changes if isinstance(change, SettleChange)]
        if len(settles) == len(changes) > 1:
            return await self._database.write_batched(
                lambda connection: apply_settles(connection, settles)
            )
        if any(map(_is_new_work, changes)):
            self._space.check_new()
        return await self._database.write(
            lambda connection: [_apply(connection, change, now) for change in changes]
        )

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        self._space.check_new()
        now = self._clock.steady()
        return await self._database.write(lambda connection: _put_chunk(connection, chunk, now))

    async def find(self, query: Query[Q]) -> list[Q]:
        if isinstance(query, TasksAt):
            return cast("list[Q]", await self._tasks_at(query))
        rows = await self._database.read(
            lambda connection: find(connection, cast("AnyQuery", query), self._damage.note_skipped)
        )
        return cast("list[Q]", rows)

    async def _tasks_at(self, query: TasksAt) -> list[Row]:
        """Reads on the Trio thread: a few rows by their keys cost less than a thread switch."""
        keys = list(map(TaskKey.of, dict.fromkeys(query.refs)))
        rows = await self._database.read_inline(
            lambda connection: [sql.select(connection, key) for key in keys]
        )
        return [row for row in rows if row is not None]

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        """Ignores `read_max`: the read runs in a thread and continues until the page is full."""
        return page_of(await self.find(query), query)

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        gone = 0
        while gone < limit:
            count = min(_SLICE_ROWS, limit - gone)
            slice_ = partial(_delete_slice, job_id=job_id, run_id=run_id, limit=count)
            removed = await self._database.write(slice_)
            gone += removed
            if removed < count:
                break
        return gone

    async def delete_expired(self, now: float) -> int:
        def op(connection: sqlite3.Connection) -> int:
            return sum(
                connection.execute(
                    f"DELETE FROM {kind.table} WHERE expires_at < ?", (now,)
                ).rowcount
                for kind in ROW_KINDS
                if kind.expiry is Expiry.STORE
            )

        gone = await self._database.write(op)
        await self._tidy(now)
        return gone

    async def _tidy(self, now: float) -> None:
        # A negative difference means that the wall clock was set back. Then tidy now: waiting for
        # the old instant could take a day.
        if not 0 <= now - self._tidied_at < _TIDY_S:
            self._tidied_at = now
            await self._database.tidy()


def _is_new_work(change: Change) -> bool:
    """Returns whether the change is refused below the floor of free space. Other writes, deletes in
    particular, may use the space below it."""
    return any(
        isinstance(write, Insert) and KIND_OF_KEY[type(write.key)].is_new_work
        for write in change.writes
    )


def _apply(connection: sqlite3.Connection, change: Change, now: float) -> Verdict:
    rows = _write_all(connection, change.writes)
    if rows is None:
        return refusal_for(connection, change.writes)
    for effect in change.effects:
        if isinstance(effect, OpenQueue):
            open_queue(connection, effect.run_id)
        else:
            enqueue(connection, effect.refs, now)
    return Applied(tuple(rows))


def _write_all(connection: sqlite3.Connection, writes: Sequence[Write]) -> list[Row | None] | None:
    """Returns the rows as written. If one write is refused, returns None and writes nothing."""
    if len(writes) == 1:  # A single statement is atomic without a savepoint.
        return _write_each(connection, writes)
    connection.execute("SAVEPOINT change")
    rows = _write_each(connection, writes)
    if rows is None:
        connection.execute("ROLLBACK TO change")
    connection.execute("RELEASE change")
    return rows


def _write_each(connection: sqlite3.Connection, writes: Sequence[Write]) -> list[Row | None] | None:
    rows: list[Row | None] = []
    for write in writes:
        done = _perform(connection, write)
        if done is False:
            return None
        rows.append(None if done is True else done)
    return rows


def _perform(connection: sqlite3.Connection, write: Write) -> Row | bool:
    """Returns the row as written, True if there is no row to return, False if refused."""
    match write:
        case Insert():
            return sql.insert(connection, write) or False
        case Update():
            return sql.update(connection, write)
        case Delete():
            # A delete of an absent row succeeds. Only a row that fails the guard is a refusal.
            return sql.delete(connection, write) or sql.holds(connection, write.key, ANY) is None
        case _:
            assert_never(write)


def refusal_for(connection: sqlite3.Connection, writes: Sequence[Write]) -> Stale | Missing:
    rows = {write.key: sql.select(connection, write.key) for write in writes}
    refusal = find_refusal(writes, rows)
    assert refusal is not None, "two writes to one row in one change"
    return refusal


def _put_chunk(connection: sqlite3.Connection, chunk: Chunk, now: float) -> Verdict:
    # Fence and counters first: they decide whether the tasks may be inserted at all.
    verdict = _apply(connection, Change((chunk.checkpoint, *chunk.count_updates())), now)
    if not isinstance(verdict, Applied):
        return verdict
    # Existing tasks are kept: the insert does nothing on a conflict.
    connection.executemany(sql.insert_sql(_TASKS), map(_TASKS.to_row, chunk.tasks))
    enqueue(connection, chunk.refs, now)
    return Applied(verdict.rows[:1])


def _delete_slice(
    connection: sqlite3.Connection, *, job_id: JobId, run_id: RunId | None, limit: int
) -> int:
    gone = 0
    for kind in KINDS_OF_RUN:
        key = ", ".join(kind.key_fields)
        is_task = kind.key_type is TaskKey
        if run_id is None:
            which = _TASKS_OF_JOB if is_task else "job_id = :job"
        else:
            which = "run_id = :run" if is_task else "job_id = :job AND run_id = :run"
        # A subquery, because DELETE with LIMIT is an optional feature of SQLite builds.
        doomed = f"SELECT {key} FROM {kind.table} WHERE {which} LIMIT :limit"
        values = {"job": job_id, "run": run_id, "limit": limit - gone}
        gone += connection.execute(
            f"DELETE FROM {kind.table} WHERE ({key}) IN ({doomed})", values
        ).rowcount
    return gone


# Settles: a group of them needs one write per counter row instead of one per task.
#
# A settle is two writes: the flip, which changes the task, and the count, which adds to the counter
# row of the shard. The guard of the count is the gate: it holds while the counter row may still be
# written. Each flip of a group is one guarded statement. The counts are summed and written once per
# counter row at the end. That halves the cost of a settle (27 us of CPU in groups of 90, 54 us
# without).


@dataclass(slots=True)
class _CounterRow:
    """The counts for one counter row, added up. `total` is None while nothing was counted."""

    is_open: bool | None
    total: dict[str, int] | None = None
    row: Row | bool = False

    def add(self, deltas: Mapping[str, int]) -> None:
        # A loop, because Counter.update costs twice as much for a dict of a few names.
        total = self.total = self.total or {}
        for name, delta in deltas.items():
            total[name] = total.get(name, 0) + delta


def apply_settles(connection: sqlite3.Connection, settles: Sequence[SettleChange]) -> list[Verdict]:
    counters: dict[tuple[AnyKey, Guard], _CounterRow] = {}
    results: list[Stale | Missing | tuple[_CounterRow | None, Row | None]] = []
    for settle in settles:
        count = settle.count
        gate = (count.key, count.guard)
        # The gate is checked before the flip, because a flip without its count would lose a count.
        # One check per group is enough: no other writer can change the row in this transaction.
        counter = counters.get(gate)
        if counter is None:
            counter = counters[gate] = _CounterRow(sql.holds(connection, *gate))
        flipped = bool(counter.is_open) and sql.update(connection, settle.flip)
        if flipped is False:
            # The verdict contains the current row. It is read now, because a later flip of the
            # same call may change that row.
            results.append(refusal_for(connection, settle.writes))
            continue
        counter.add(count.deltas)
        returned = None if count.is_quiet else counter
        results.append((returned, None if flipped is True else flipped))
    for (key, guard), counter in counters.items():
        if counter.total is not None:
            counter.row = sql.update(connection, Update(key, guard, {}, counter.total))
    return [
        _applied_verdict(*result) if isinstance(result, tuple) else result for result in results
    ]


def _applied_verdict(counter: _CounterRow | None, task: Row | None) -> Applied:
    if counter is None:
        return Applied((task, None))
    assert not isinstance(counter.row, bool), "a gate that was open a moment ago"
    return Applied((task, counter.row))


# Queries: each one as SQL, in the order that it promises (docs/storage.md, Queries).


_NO_LIMIT = -1  # SQLite reads a negative LIMIT as no limit.


def find(
    connection: sqlite3.Connection, query: AnyQuery, note_damage: Callable[[RowDamaged], None]
) -> list[Any]:
    """Returns the rows that can be decoded, up to the limit of the query.

    A query without a limit needs every row of a run, so it raises RowDamaged if one cannot be
    decoded.
    """
    plan = plan_of(query)
    table = TABLES[plan.key_type]
    text = (
        f"SELECT {columns_sql(table)} FROM {table.name} WHERE {plan.where} "
        f"ORDER BY {plan.order} LIMIT ?"
    )
    if plan.limit is None:
        return list(fetch(connection, table, text, [*plan.parameters, _NO_LIMIT]))
    # A damaged row must not shorten the page: callers take a short page for the last one. So read
    # again with a limit that is larger by the damaged rows, until the page is full or the rows end.
    skipped = 0
    while True:
        read_max = plan.limit + skipped
        rows, damages = split_damaged(fetch(connection, table, text, [*plan.parameters, read_max]))
        if len(damages) == skipped or len(rows) + len(damages) < read_max:
            for damage in damages:
                note_damage(damage)
            return rows
        skipped = len(damages)
