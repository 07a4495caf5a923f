"""SqliteStore: applies each change, with its effects, as one step of a transaction
(docs/engines.md).

A write is one statement that contains its guard and returns its row. Only after a refusal does the
store read the row to find the reason. A change of several writes runs inside a savepoint, and a
refused write rolls back to it. The alternative, to check all guards before the first write, takes
longer (a settle: 65 us with the savepoint, 70 us with the checks).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, assert_never, cast

from conveyor.domain.changes import (
    ANY,
    KIND_OF_KEY,
    KINDS_OF_RUN,
    ROW_KINDS,
    AnyKey,
    Applied,
    BatchKey,
    Change,
    Chunk,
    Delete,
    EventKey,
    Expiry,
    ExportKey,
    Guard,
    InputKey,
    Insert,
    JobKey,
    Key,
    Missing,
    NoticeKey,
    OpenQueue,
    R,
    Row,
    RunKey,
    SampleKey,
    ScheduleKey,
    ScrubKey,
    SettleChange,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
    Write,
    find_refusal,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    DueExpiries,
    DueExports,
    DueNotices,
    DueSchedules,
    DueScrubs,
    EventsOf,
    ExpiredInputs,
    JobsOf,
    NoticesOf,
    Q,
    Query,
    RunsIn,
    RunsOf,
    SamplesOf,
    StatsOf,
    TaskPage,
    TasksAt,
    TasksOf,
    UnplacedEvents,
    page_of,
)
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


_Gate = tuple[AnyKey, Guard]


def apply_settles(connection: sqlite3.Connection, settles: Sequence[SettleChange]) -> list[Verdict]:
    gates: dict[_Gate, bool | None] = {}
    sums: dict[_Gate, Counter[str]] = {}
    results: list[Stale | Missing | Row | None] = []
    for settle in settles:
        gate = (settle.count.key, settle.count.guard)
        # The gate is checked before the flip, because a flip without its count would lose a count.
        # One check per group is enough: no other writer can change the row in this transaction.
        if gate not in gates:
            gates[gate] = sql.holds(connection, *gate)
        flipped = bool(gates[gate]) and sql.update(connection, settle.flip)
        if flipped is False:
            # The verdict contains the current row. It is read now, because a later flip of the
            # same call may change that row.
            results.append(refusal_for(connection, settle.writes))
            continue
        sums.setdefault(gate, Counter()).update(settle.count.deltas)
        results.append(None if flipped is True else flipped)
    counters = {
        key: sql.update(connection, Update(key, guard, {}, dict(total)))
        for (key, guard), total in sums.items()
    }
    return [
        result
        if isinstance(result, Stale | Missing)
        else _applied_verdict(settle, result, counters)
        for settle, result in zip(settles, results, strict=True)
    ]


def _applied_verdict(
    settle: SettleChange, task: Row | None, counters: dict[AnyKey, Row | bool]
) -> Applied:
    counter = counters[settle.count.key]
    assert not isinstance(counter, bool), "a gate that was open a moment ago"
    return Applied((task, counter))


# Queries: each one as SQL, in the order that it promises (docs/storage.md, Queries).


_NO_LIMIT = -1  # SQLite reads a negative LIMIT as no limit.
_Term = tuple[str, Any]


def find(
    connection: sqlite3.Connection, query: AnyQuery, note_damage: Callable[[RowDamaged], None]
) -> list[Any]:
    """Returns the rows that can be decoded, up to the limit of the query.

    A query without a limit needs every row of a run, so it raises RowDamaged if one cannot be
    decoded.
    """
    key_type, terms, order, limit = _plan(query)
    table = TABLES[key_type]
    where = " AND ".join(term for term, _ in terms)
    parameters = [value for _, values in terms for value in values]
    text = f"SELECT {columns_sql(table)} FROM {table.name} WHERE {where} ORDER BY {order} LIMIT ?"
    # Counters and batches of a run: a missing row would make their sum wrong, so damage is raised.
    if limit == _NO_LIMIT:
        return list(fetch(connection, table, text, [*parameters, limit]))
    # A damaged row must not shorten the page: callers take a short page for the last one. So read
    # again with a limit that is larger by the damaged rows, until the page is full or the rows end.
    skipped = 0
    while True:
        read_max = limit + skipped
        rows, damages = _split(fetch(connection, table, text, [*parameters, read_max]))
        if len(damages) == skipped or len(rows) + len(damages) < read_max:
            for damage in damages:
                note_damage(damage)
            return rows
        skipped = len(damages)


def _split(rows: Iterator[Any]) -> tuple[list[Any], list[RowDamaged]]:
    good: list[Any] = []
    damages: list[RowDamaged] = []
    while True:
        try:
            good.extend(rows)
        except RowDamaged as error:
            damages.append(error)
        else:
            return good, damages


def _plan(query: AnyQuery) -> tuple[type, list[_Term], str, int]:  # noqa: C901, PLR0912 (one branch a kind)
    match query:
        case TasksOf():
            return TaskKey, _tasks_of(query), "task_id", query.limit
        case TasksAt():
            raise AssertionError("read by key")
        case StatsOf():
            return StatsKey, _in_run(query), "shard", _NO_LIMIT
        case JobsOf():
            return JobKey, _jobs_of(query), "job_id DESC", query.limit
        case RunsOf():
            return RunKey, _runs_of(query), "sequence DESC", query.limit
        case BatchesOf():
            return BatchKey, _in_run(query), "created_at, batch_id", _NO_LIMIT
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


def _in_run(query: StatsOf | BatchesOf | SamplesOf) -> list[_Term]:
    return [("job_id = ?", [query.job_id]), ("run_id = ?", [query.run_id])]


def _status_in(statuses: Collection[str]) -> _Term:
    marks = ", ".join("?" * len(statuses))
    return f"status IN ({marks})", [str.__str__(status) for status in statuses]
