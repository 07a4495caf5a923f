"""PostgresStore: applies the changes of many callers as one transaction (docs/engines.md,
Postgres engine).

A transaction has two round trips. The first locks the rows of all changes and reads them. Then the
domain decides each change on these rows, one after the other, as the memory engine does. The second
writes what has changed, in few statements for many rows, and commits. So no guard exists twice, as
Python and as SQL, and a refused change needs no savepoint.

A row that does not exist cannot be locked. If another transaction inserts it meanwhile, the insert
here does nothing, and the transaction starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import outcome
from psycopg.errors import Error

from conveyor.domain.changes import (
    KIND_OF_KEY,
    KINDS_OF_RUN,
    ROW_KINDS,
    AnyKey,
    Change,
    Chunk,
    Expiry,
    Key,
    R,
    Row,
    RowKind,
    TaskKey,
    Verdict,
)
from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.queries import AnyQuery, Q, Query, TaskPage, TasksAt, TasksOf, page_of
from conveyor.engines.group_commit import GroupCommit, Waiter
from conveyor.engines.postgres import sql
from conveyor.engines.postgres.connection import (
    BEGIN,
    COMMIT,
    ROLLBACK,
    Answer,
    Connection,
    Statement,
    copy_columns,
)
from conveyor.engines.postgres.database import Database
from conveyor.engines.postgres.errors import (
    UNDEFINED_TABLE,
    UNIQUE_VIOLATION,
    is_rolled_back,
    is_transient,
    translate,
    translated,
)
from conveyor.engines.postgres.queue import Instant, open_queues, send
from conveyor.engines.postgres.sql import TABLES
from conveyor.engines.postgres.task_tables import SHARED, TaskTables, drop_of, own_tables
from conveyor.engines.postgres.transaction import Transaction, lock_statements
from conveyor.engines.sql_mapping import plan_of, split_damaged
from conveyor.ports.errors import PartlyUnavailable, StorageFull, Unavailable
from conveyor.ports.store import DamageLog

# Bounds the time of a transaction, whose locks other processes may wait for.
_GROUP_MAX = 256
# Transactions of this process at the same time. While one waits for the disk or for a lock, the
# next one gathers its rows.
_GROUPS_AT_ONCE = 3
# How often a transaction starts over because of another one.
_TRIES_MAX = 10
# Task rows have no job id, so the rows of a job's tasks are found by its runs.
_TASKS_OF_JOB = "run_id IN (SELECT run_id FROM runs WHERE job_id = $1)"
_TASK_TABLE = TABLES[TaskKey]

_Waiter = Waiter[Sequence[Change], list[Verdict]]


class _Overtaken(Exception):
    """Another transaction inserted a row that this one has not seen."""


class PostgresStore:
    def __init__(self, database: Database, instant: Instant) -> None:
        self._database = database
        self._instant = instant
        self._tables = TaskTables(database)
        self._damage = DamageLog()
        self._groups: GroupCommit[Sequence[Change], list[Verdict]] = GroupCommit(
            self._start_group, group_max=_GROUP_MAX, concurrent_groups_max=_GROUPS_AT_ONCE
        )

    async def read(self, key: Key[R]) -> R | None:
        rows = await self._select(cast("AnyKey", key))
        return cast("R | None", next(iter(rows), None))

    async def _select(self, key: AnyKey) -> list[Row]:
        table = TABLES[type(key)]
        if not isinstance(key, TaskKey):
            answer = await self._database.read(sql.select_row(key, table.name))
            return list(map(table.from_row, answer.rows))

        async def select(place: str) -> list[Row]:
            answer = await self._database.read(sql.select_row(key, place))
            return list(map(table.from_row, answer.rows))

        return await self._in_task_table(key.run_id, select)

    async def _in_task_table(self, run_id: RunId, select: Callable[[str], Any]) -> list[Any]:
        """Reads in the table of a run. If it was dropped meanwhile, the run has no rows."""
        try:
            rows: list[Any] = await select(await self._tables.place(run_id))
        except Error as error:
            if error.sqlstate != UNDEFINED_TABLE:
                raise
            self._tables.forget([run_id])
            return []
        return rows

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        if not changes:
            return []
        return await self._groups.write(changes)

    def _start_group(self) -> None:
        group = [waiter for waiter in self._groups.take() if waiter.task is not None]
        self._database.start(partial(self._commit_group, group))

    async def _commit_group(self, group: list[_Waiter]) -> None:
        try:
            results = await self._commit_together(group)
            for waiter, result in zip(group, results, strict=True):
                waiter.result = result
        finally:
            self._groups.end(group)

    async def _commit_together(self, group: list[_Waiter]) -> list[outcome.Outcome[list[Verdict]]]:
        calls = [waiter.write for waiter in group]
        result = await outcome.acapture(self._transact, calls)
        if isinstance(result, outcome.Value):
            return [outcome.Value(verdicts) for verdicts in result.unwrap()]
        if isinstance(result.error, Unavailable):
            return [outcome.Error(_copy_for(result.error, call)) for call in calls]
        if len(calls) == 1:
            return [result]
        # A mistake in one call must not fail the others.
        return [(await self._commit_together([waiter]))[0] for waiter in group]

    async def _transact(self, calls: Sequence[Sequence[Change]]) -> list[list[Verdict]]:
        keys = {
            _address(write.key): write.key
            for call in calls
            for change in call
            for write in change.writes
        }
        run_ids = {key.run_id for key in keys.values() if isinstance(key, TaskKey)}
        for _ in range(_TRIES_MAX):
            try:
                return await self._try_transaction(calls, list(keys.values()), run_ids)
            except _Overtaken:
                continue
            except Error as error:
                # A task table that was dropped meanwhile, or created by another process.
                if error.sqlstate != UNDEFINED_TABLE:
                    raise
                self._tables.forget(run_ids)
        raise _Refused("PostgreSQL: overtaken by other transactions again and again")

    async def _try_transaction(
        self, calls: Sequence[Sequence[Change]], keys: Sequence[AnyKey], run_ids: set[RunId]
    ) -> list[list[Verdict]]:
        places = await self._tables.places(run_ids)
        async with self._database.connection() as connection:
            locks = lock_statements(keys, places)
            transaction = Transaction(keys, await _begin(connection, locks), places)
            verdicts = [transaction.decide(call) for call in calls]
            statements = transaction.statements(self._instant())
            if not statements:
                await connection.run([ROLLBACK])
                return verdicts
            await _finish(connection, statements)
        self._tables.forget(transaction.new_run_ids)
        return verdicts

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        return await self._database.run_detached(partial(self._put_chunk, chunk))

    async def _put_chunk(self, chunk: Chunk) -> Verdict:
        change = Change((chunk.checkpoint, *chunk.count_updates()))
        keys = [write.key for write in change.writes]
        run_id = chunk.key.run_id
        with_copy = True
        for _ in range(_TRIES_MAX):
            place = await self._tables.place(run_id)
            try:
                async with self._database.connection() as connection:
                    transaction = Transaction(
                        keys, await _begin(connection, lock_statements(keys, {})), {}
                    )
                    (verdict,) = transaction.decide([change])
                    statements = transaction.statements(None)
                    if not statements:
                        await connection.run([ROLLBACK])
                        return verdict
                    inserts = await self._insert_tasks(connection, chunk, place, with_copy)
                    opening = [open_queues([run_id])] if chunk.refs else []
                    messages = [*opening, *send(chunk.refs, self._instant())]
                    await _finish(connection, [*inserts, *messages, *statements])
                    return transaction.first_row_only(verdict)
            except _Overtaken:
                continue
            except Error as error:
                if error.sqlstate == UNIQUE_VIOLATION:
                    # Some tasks exist. COPY cannot leave them alone; an INSERT can.
                    with_copy = False
                elif error.sqlstate == UNDEFINED_TABLE:
                    self._tables.forget([run_id])
                else:
                    raise
        raise _Refused("PostgreSQL: overtaken by other transactions again and again")

    async def _insert_tasks(
        self, connection: Connection, chunk: Chunk, place: str, with_copy: bool
    ) -> list[Statement]:
        """Copies the tasks into their table, or returns what inserts them."""
        target = place.removeprefix("ONLY ")
        if not chunk.tasks:
            return []
        if not with_copy:
            return [sql.insert_absent_rows(_TASK_TABLE, target, chunk.tasks)]
        pieces = copy_columns(_TASK_TABLE.to_columns(chunk.tasks))
        await connection.copy(f"{target} ({sql.columns_sql(_TASK_TABLE)})", pieces)
        return []

    async def find(self, query: Query[Q]) -> list[Q]:
        if isinstance(query, TasksAt):
            return cast("list[Q]", await self._tasks_at(query))
        if isinstance(query, TasksOf):
            find = partial(self._find, cast("AnyQuery", query))
            return cast("list[Q]", await self._in_task_table(query.run_id, find))
        return cast("list[Q]", await self._find(cast("AnyQuery", query), None))

    async def _find(
        self, query: AnyQuery, place: str | None, until: TaskId | None = None
    ) -> list[Any]:
        """Returns the rows that can be decoded, up to the limit of the query, and to the task
        `until`.

        A query without a limit needs every row of a run, so it raises RowDamaged if one cannot be
        decoded.
        """
        plan = plan_of(query)
        table = TABLES[plan.key_type]
        where, parameters = plan.where, plan.parameters
        if until is not None:
            where, parameters = f"{where} AND task_id <= ?", [*parameters, until]
        text = sql.numbered(
            f"SELECT {sql.columns_sql(table)} FROM {place or table.name} WHERE {where} "
            f"ORDER BY {plan.order} LIMIT ?"
        )
        if plan.limit is None:
            answer = await self._database.read(Statement(text, [*parameters, None]))
            return list(map(table.from_row, answer.rows))
        # A damaged row must not shorten the page: callers take a short page for the last one. So
        # read again with a limit that is larger by the damaged rows.
        skipped = 0
        while True:
            read_max = plan.limit + skipped
            answer = await self._database.read(Statement(text, [*parameters, read_max]))
            rows, damages = split_damaged(map(table.from_row, answer.rows))
            if len(damages) == skipped or len(answer.rows) < read_max:
                for damage in damages:
                    self._damage.note_skipped(damage)
                return rows
            skipped = len(damages)

    async def _tasks_at(self, query: TasksAt) -> list[Row]:
        by_run: dict[RunId, list[TaskId]] = {}
        for ref in dict.fromkeys(query.refs):
            by_run.setdefault(ref.run_id, []).append(ref.task_id)
        rows: list[Row] = []
        for run_id, task_ids in by_run.items():

            async def select(
                place: str, run_id: RunId = run_id, task_ids: list[TaskId] = task_ids
            ) -> list[Row]:
                answer = await self._database.read(sql.select_tasks(place, run_id, task_ids))
                return list(map(_TASK_TABLE.from_row, answer.rows))

            rows += await self._in_task_table(run_id, select)
        return rows

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        if query.statuses is None or query.have_problems:
            # Every row that is read is returned: failed tasks have an index.
            return page_of(await self.find(query), query)
        # Another state may be rare, and an index of it would cost every settle an update of all
        # indexes. So the page ends where the rows that it may read do.
        ends = await self._in_task_table(query.run_id, partial(self._page_end, query, read_max))
        until = ends[0] if ends else None
        find = partial(self._find, query, until=until)
        page = page_of(await self._in_task_table(query.run_id, find), query)
        return page if page.until is not None else TaskPage(page.tasks, until)

    async def _page_end(self, query: TasksOf, read_max: int, place: str) -> list[TaskId]:
        """Returns the last task that a page may read, unless the run ends before."""
        end = sql.select_task_id_at(place, query.run_id, query.after or "", read_max)
        return [TaskId(task_id) for (task_id,) in (await self._database.read(end)).rows]

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        own = await self._database.read(own_tables(job_id, run_id))
        for (run,) in own.rows:
            # A drop counts as one row.
            await self._database.run(*drop_of(run))
            self._tables.forget([run])
        gone = len(own.rows)
        for kind in KINDS_OF_RUN:
            if gone >= limit:
                break
            delete = _deletion_of(kind, job_id, run_id, limit - gone)
            gone += (await self._database.write(delete)).rows_count
        return gone

    async def delete_expired(self, now: float) -> int:
        deletes = [
            Statement(f"DELETE FROM {kind.table} WHERE expires_at < $1", (now,))
            for kind in ROW_KINDS
            if kind.expiry is Expiry.STORE
        ]
        return sum(answer.rows_count for answer in await self._database.run(*deletes))


async def _begin(connection: Connection, locks: Sequence[Statement]) -> list[Answer]:
    """Locks and reads rows. If this fails, certainly nothing was written."""
    try:
        with translated():
            return (await connection.run([BEGIN, *locks]))[1:]
    except Unavailable as error:
        if isinstance(cause := error.__cause__, Error) and is_transient(cause):
            raise _Overtaken from error
        raise _refused(error) from error.__cause__


async def _finish(connection: Connection, statements: Sequence[Statement]) -> None:
    """Writes and commits in one round trip: after an error the server skips the COMMIT."""
    try:
        await connection.run([*statements, COMMIT])
    except Error as error:
        if is_transient(error) or error.sqlstate == UNIQUE_VIOLATION:
            raise _Overtaken from error
        # Otherwise the connection was lost, and perhaps the answer to the COMMIT with it: that
        # outcome is unknown.
        if is_rolled_back(error) and (outage := translate(error)) is not None:
            raise _refused(outage) from error
        raise


class _Refused(Unavailable):
    """Certainly nothing was written."""


def _refused(outage: Unavailable) -> Unavailable:
    # A full disk says by its name that nothing was written, and callers handle it apart.
    return outage if isinstance(outage, StorageFull) else _Refused(str(outage))


def _copy_for(error: Unavailable, call: Sequence[Change]) -> Unavailable:
    """Returns the error of a group for one of its callers."""
    if isinstance(error, _Refused):
        places = range(len(call))
        refusal = PartlyUnavailable(str(error), [None] * len(call), frozenset(places))
        refusal.__cause__ = error.__cause__
        return refusal
    return error


def _address(key: AnyKey) -> tuple[Any, ...]:
    kind = KIND_OF_KEY[type(key)]
    return kind.table, *kind.address_of(key)


def _deletion_of(kind: RowKind, job_id: JobId, run_id: RunId | None, limit: int) -> Statement:
    is_task = kind.key_type is TaskKey
    place = SHARED if is_task else kind.table
    params: list[str] = [job_id]
    if run_id is None:
        where = _TASKS_OF_JOB if is_task else "job_id = $1"
    elif is_task:
        where, params = "run_id = $1", [run_id]
    else:
        where, params = "job_id = $1 AND run_id = $2", [job_id, run_id]
    text = (
        f"DELETE FROM {place} WHERE ctid = ANY(ARRAY("
        f"SELECT ctid FROM {place} WHERE {where} LIMIT ${len(params) + 1}))"
    )
    return Statement(text, [*params, limit])
