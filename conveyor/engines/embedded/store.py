"""SqliteStore: every change is one step of a transaction, its effects included (docs/engines.md).

Each write carries its guard and answers with its row, so that the common case is one statement a
write; only a refusal is looked into. A change of several writes is undone through a savepoint,
which costs less than to look at all guards first (a settle: 65 us, against 70).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any, assert_never, cast

from conveyor.domain.changes import (
    ANY,
    AnyKey,
    Applied,
    BatchKey,
    Change,
    Chunk,
    Delete,
    ExportKey,
    Guard,
    InputKey,
    Insert,
    JobKey,
    Key,
    Missing,
    R,
    Row,
    RunKey,
    ScheduleKey,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
    Write,
    is_tally,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.queries import AnyQuery, Q, Query, TaskPage, TasksOf, page_of
from conveyor.engines.embedded import statements
from conveyor.engines.embedded.database import Database
from conveyor.engines.embedded.finds import find
from conveyor.engines.embedded.queue import enqueue
from conveyor.engines.embedded.rows import (
    BATCHES,
    BUDGETS,
    EVENTS,
    EXPORTS,
    NOTICES,
    RUNS,
    SHARES,
    STATS,
    TASKS,
)
from conveyor.engines.embedded.space import Space
from conveyor.engines.embedded.tallies import apply_tallies
from conveyor.ports.clock import Clock
from conveyor.ports.damage import DamageLog

# Between two looks at what the file can give back, well within a minute of a delete.
_TIDY_S = 10.0
_SLICE_ROWS = 500  # Removed in one step: about 5 ms during which nothing else runs.

# Runs come last: only their rows tell whose the tasks are.
_TASKS_OF_JOB = "run_id IN (SELECT run_id FROM runs WHERE job_id = :job)"
_OF_JOB = "job_id = :job"
_OF_RUN = "job_id = :job AND run_id = :run"
_SCRUBBED = (
    (TASKS, _TASKS_OF_JOB, "run_id = :run"),
    (STATS, _OF_JOB, _OF_RUN),
    (BATCHES, _OF_JOB, _OF_RUN),
    (NOTICES, _OF_JOB, _OF_RUN),
    (EVENTS, _OF_JOB, _OF_RUN),
    (EXPORTS, _OF_JOB, _OF_RUN),
    (BUDGETS, _OF_JOB, _OF_RUN),
    (SHARES, _OF_JOB, _OF_RUN),
    (RUNS, _OF_JOB, _OF_RUN),
)

# What makes a data directory grow. Everything else, deletes above all, may use the room that is
# kept for it.
_NEW_WORK = (BatchKey, ExportKey, InputKey, JobKey, RunKey, ScheduleKey, TaskKey)

_EXPIRING = ("key_records", "events")


class SqliteStore:
    def __init__(self, database: Database, clock: Clock, space: Space) -> None:
        self._database = database
        self._clock = clock
        self._space = space
        self._tidied_at = 0.0
        self._damage = DamageLog()

    async def read(self, key: Key[R]) -> R | None:
        def op(connection: sqlite3.Connection) -> Any:
            return statements.select(connection, cast("AnyKey", key))

        return cast("R | None", await self._database.glance(op))

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        now = self._clock.steady()

        if len(changes) > 1 and all(map(is_tally, changes)):
            return await self._database.write_in_company(
                lambda connection: apply_tallies(connection, changes, _refuse)
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
        rows = await self._database.read(
            lambda connection: find(connection, cast("AnyQuery", query), self._damage.note_skipped)
        )
        return cast("list[Q]", rows)

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        """Rows are read in a thread, and fast: it looks on until it has what was asked for."""
        return page_of(await self.find(query), query)

    async def scrub(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        gone = 0
        while gone < limit:
            count = min(_SLICE_ROWS, limit - gone)
            slice_ = partial(_scrub, job_id=job_id, run_id=run_id, limit=count)
            removed = await self._database.write(slice_)
            gone += removed
            if removed < count:
                break
        return gone

    async def purge(self, now: float) -> int:
        def op(connection: sqlite3.Connection) -> int:
            return sum(
                connection.execute(f"DELETE FROM {name} WHERE expires_at < ?", (now,)).rowcount
                for name in _EXPIRING
            )

        gone = await self._database.write(op)
        await self._tidy(now)
        return gone

    async def _tidy(self, now: float) -> None:
        # A clock that was put back must not end it for a day.
        if not 0 <= now - self._tidied_at < _TIDY_S:
            self._tidied_at = now
            await self._database.tidy()


def _is_new_work(change: Change) -> bool:
    return any(
        isinstance(write, Insert) and isinstance(write.key, _NEW_WORK) for write in change.writes
    )


def _apply(connection: sqlite3.Connection, change: Change, now: float) -> Verdict:
    rows = _write_all(connection, change.writes)
    if rows is None:
        return _answer_no(connection, change.writes)
    for effect in change.effects:
        enqueue(connection, effect.refs, now)
    return Applied(tuple(rows))


def _write_all(connection: sqlite3.Connection, writes: Sequence[Write]) -> list[Row | None] | None:
    """The rows as written; None, and nothing written, when one of the writes is refused."""
    if len(writes) == 1:  # Happens or not, all by itself.
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
    """The row as written, or True when there is none to show; False when it is refused."""
    match write:
        case Insert():
            return statements.insert(connection, write) or False
        case Update():
            return statements.update(connection, write)
        case Delete():
            return statements.delete(connection, write) or not _refusal(connection, write)
        case _:
            assert_never(write)


def _refuse(connection: sqlite3.Connection, change: Change) -> Stale | Missing:
    return _answer_no(connection, change.writes)


def _answer_no(connection: sqlite3.Connection, writes: Sequence[Write]) -> Stale | Missing:
    refusals = [no for write in writes if (no := _refusal(connection, write)) is not None]
    assert refusals, "two writes to one row in one change"
    return next((no for no in refusals if isinstance(no, Missing)), refusals[0])


def _refusal(connection: sqlite3.Connection, write: Write) -> Stale | Missing | None:
    match write:
        case Insert():
            passes = statements.holds(connection, write.key, _making_room_for(write))
            fits = passes is None or (passes and write.over_expired_at is not None)
        case Update():
            passes = statements.holds(connection, write.key, write.guard)
            if passes is None:
                return Missing(write.key)
            fits = passes
        case Delete():
            fits = statements.holds(connection, write.key, write.guard) is not False
        case _:
            assert_never(write)
    return None if fits else Stale(write.key, statements.select(connection, write.key))


def _making_room_for(write: Insert) -> Guard:
    if write.over_expired_at is None:
        return ANY
    return Guard(lapsed=("expires_at", write.over_expired_at))


def _put_chunk(connection: sqlite3.Connection, chunk: Chunk, now: float) -> Verdict:
    fence = Guard(equals=(("epoch", chunk.epoch), ("done", chunk.done_before)))
    gate = Guard(status_in=chunk.gate_in)
    counts = [
        Update(StatsKey(chunk.key.job_id, chunk.key.run_id, shard), gate, deltas=deltas)
        for shard, deltas in sorted(chunk.stats.items())
    ]
    checkpoint = Update(chunk.key, fence, values=chunk.values)
    verdict = _apply(connection, Change((checkpoint, *counts)), now)
    if not isinstance(verdict, Applied):
        return verdict
    connection.executemany(statements.insert_sql(TASKS), map(TASKS.to_row, chunk.tasks))
    enqueue(connection, chunk.refs, now)
    return Applied(verdict.rows[:1])


def _scrub(
    connection: sqlite3.Connection, *, job_id: JobId, run_id: RunId | None, limit: int
) -> int:
    gone = 0
    for table, of_job, of_run in _SCRUBBED:
        key = ", ".join(table.key_columns)
        which = of_job if run_id is None else of_run
        doomed = f"SELECT {key} FROM {table.name} WHERE {which} LIMIT :limit"
        values = {"job": job_id, "run": run_id, "limit": limit - gone}
        gone += connection.execute(
            f"DELETE FROM {table.name} WHERE ({key}) IN ({doomed})", values
        ).rowcount
    return gone
