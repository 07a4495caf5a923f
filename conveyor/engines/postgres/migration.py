"""Migration of another engine's data into an empty database, page by page
(docs/engines.md, Migration from SQLite to Postgres).

A page is one transaction with the position behind it, so a migration that was killed goes on where
it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain.changes import ROW_KINDS, RowKind, RunKey, TaskKey
from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import RunId
from conveyor.engines.postgres import sql
from conveyor.engines.postgres.connection import (
    BEGIN,
    COMMIT,
    Connection,
    Statement,
    copy_pieces,
)
from conveyor.engines.postgres.database import Database
from conveyor.engines.postgres.queue import open_queues
from conveyor.engines.postgres.sql import TABLES
from conveyor.engines.postgres.task_tables import TaskTables, creation_of

_RUN_FIELDS = TABLES[RunKey].columns
_TASK_RUN_AT = TABLES[TaskKey].columns.index("run_id")

_FIND = "SELECT migration_id, step, position, has_ended FROM engine_migrations"
# A row that is there already is of a migration that was killed before it marked its source.
_FORGET = "DELETE FROM engine_migrations"
_BEGIN = "INSERT INTO engine_migrations VALUES ($1, $2, NULL, false)"
_ADVANCE = "UPDATE engine_migrations SET step = $2, position = $3 WHERE migration_id = $1"
_END = "UPDATE engine_migrations SET has_ended = true WHERE migration_id = $1"
_IS_BEING_SERVED = "SELECT EXISTS (SELECT FROM status_reports WHERE expires_at > instant(NULL))"
_SEND = """
INSERT INTO messages (queue_id, job_id, task_id, shard, visible_at, receives)
SELECT queue_id, job_id, task_id, shard, instant(NULL) + delay_s, receives
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::double precision[], $6::bigint[])
    WITH ORDINALITY AS refs (run_id, job_id, task_id, shard, delay_s, receives, place)
JOIN queues USING (run_id) ORDER BY place
"""


class MigrationRefused(ConveyorError):
    """The database cannot take the data, or does not have all of it yet."""


class Progress(msgspec.Struct, frozen=True):
    """The step that is being done, and the position behind the last page of it."""

    step: str
    position: Any
    has_ended: bool


class MigrationTarget:
    """The database that a migration fills. One process migrates: it holds the source's lock."""

    def __init__(self, database: Database, migration_id: str) -> None:
        self._database = database
        self._migration_id = migration_id
        self._tables = TaskTables(database)

    async def find_progress(self) -> Progress | None:
        """Returns None before the beginning. Raises MigrationRefused if the database has other
        data."""
        answer = await self._database.read(Statement(_FIND))
        for migration_id, step, position, has_ended in answer.rows:
            if migration_id == self._migration_id:
                place = None if position is None else msgspec.json.decode(position)
                return Progress(step, place, has_ended)
        await self._require_empty()
        return None

    async def _require_empty(self) -> None:
        exists = " OR ".join(f"EXISTS (SELECT FROM {kind.table})" for kind in ROW_KINDS)
        ((has_rows,),) = (await self._database.read(Statement(f"SELECT {exists}"))).rows
        if has_rows:
            raise MigrationRefused(
                "the database is not empty: name another one in CONVEYOR_DATABASE_URL, or empty it"
            )
        ((is_served,),) = (await self._database.read(Statement(_IS_BEING_SERVED))).rows
        if is_served:
            raise MigrationRefused("processes work on the database: stop them first")

    async def begin(self, step: str) -> None:
        begin = Statement(_BEGIN, (self._migration_id, step))
        await self._database.run(Statement(_FORGET), begin)

    async def advance(self, step: str, position: Any) -> None:
        await self._database.write(self._advance(step, position))

    async def end(self) -> None:
        await self._database.write(Statement(_END, (self._migration_id,)))

    async def put_rows(self, kind: RowKind, rows: Sequence[Sequence[Any]], position: Any) -> None:
        """Copies rows of a kind, with the values that they had in the other database."""
        table = TABLES[kind.key_type]
        places = await self._places(kind, rows)
        flags = [at for at, stored in enumerate(table.stored_types) if stored is bool]
        async with self._database.connection() as connection:
            await connection.run([BEGIN, *_own_tables(kind, rows)])
            for place, own in _by_place(kind, rows, places).items():
                columns = f"{place} ({sql.columns_sql(table)})"
                await connection.copy(columns, copy_pieces(_with_flags(row, flags) for row in own))
            await self._commit(connection, kind.table, position)

    async def put_queues(self, step: str, run_ids: Sequence[RunId], position: Any) -> None:
        await self._database.run(open_queues(run_ids), self._advance(step, position))

    async def put_messages(
        self, step: str, messages: Sequence[Sequence[Any]], position: Any
    ) -> None:
        """Sends references (run, job, task, shard, delay, receives) in this order."""
        columns = [list(column) for column in zip(*messages, strict=True)]
        await self._database.run(Statement(_SEND, columns), self._advance(step, position))

    async def _places(self, kind: RowKind, rows: Sequence[Sequence[Any]]) -> dict[str, str]:
        if kind.key_type is not TaskKey:
            return {}
        places = await self._tables.places({row[_TASK_RUN_AT] for row in rows})
        return {run_id: place.removeprefix("ONLY ") for run_id, place in places.items()}

    async def _commit(self, connection: Connection, step: str, position: Any) -> None:
        await connection.run([self._advance(step, position), COMMIT])

    def _advance(self, step: str, position: Any) -> Statement:
        text = None if position is None else msgspec.json.encode(position).decode()
        return Statement(_ADVANCE, (self._migration_id, step, text))


async def refuse_unfinished(database: Database) -> None:
    """Raises MigrationRefused while a migration into the database has not ended."""
    answer = await database.read(Statement(_FIND))
    if not all(has_ended for _, _, _, has_ended in answer.rows):
        raise MigrationRefused(
            "the data of another engine is being migrated into this database: wait for "
            "`conveyor migrate-engine`, or start it again"
        )


def _own_tables(kind: RowKind, rows: Sequence[Sequence[Any]]) -> list[Statement]:
    """Returns what creates the own tables of long runs."""
    if kind.key_type is not RunKey:
        return []
    runs = [dict(zip(_RUN_FIELDS, row, strict=True)) for row in rows]
    return [
        statement
        for run in runs
        for statement in creation_of(
            run["job_id"], run["run_id"], max(run["planned"], run["total"])
        )
    ]


def _by_place(
    kind: RowKind, rows: Sequence[Sequence[Any]], places: dict[str, str]
) -> dict[str, list[Sequence[Any]]]:
    by_place: dict[str, list[Sequence[Any]]] = {}
    for row in rows:
        place = places[row[_TASK_RUN_AT]] if places else kind.table
        by_place.setdefault(place, []).append(row)
    return by_place


def _with_flags(row: Sequence[Any], flags: Sequence[int]) -> Sequence[Any]:
    """Returns the row with truth values where the other database has numbers."""
    if not flags:
        return row
    values = list(row)
    for at in flags:
        values[at] = bool(values[at])
    return values
