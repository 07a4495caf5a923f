"""Gives each test its own schema of one PostgreSQL server, as if it were a database."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest
import trio

from conveyor.engines.postgres.connection import Answer, Connection, Statement, connect
from conveyor.engines.postgres.database import DatabaseConfig
from conveyor.engines.postgres.engine import create_tables

_numbers = count()
# Creating the tables takes longer than most tests, so a test leaves its tables empty for another.
_empty: dict[str, list[str]] = {}

_TABLES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = current_schema() AND table_name <> 'schema_versions'
"""


@asynccontextmanager
async def empty_tables(url: str) -> AsyncGenerator[str, None]:
    """Yields a URL whose connections use a schema with empty tables."""
    mine = _empty.setdefault(url, [])
    if not mine:
        schema_url = await a_schema(url)
        await create_tables(DatabaseConfig(url=schema_url))
        mine.append(schema_url)
    own = mine.pop()
    try:
        yield own
    finally:
        with trio.CancelScope(shield=True):
            names = [str(name) for (name,) in await execute(own, _TABLES)]
            own_tables = [name for name in names if name.startswith("tasks_")]
            drops = [f'DROP TABLE "{name}"' for name in own_tables]
            await execute(
                own, *drops, *(f"DELETE FROM {name}" for name in names if name not in own_tables)
            )
            mine.append(own)


async def a_schema(url: str) -> str:
    """Returns a URL whose connections use a schema without any table."""
    name = f"test_{next(_numbers)}"
    await execute(url, f"CREATE SCHEMA {name}")
    return f"{url}?options=-c%20search_path%3D{name}"


async def execute(url: str, *statements: str) -> list[tuple[object, ...]]:
    """Runs statements, as an operator with psql would. Returns the rows of the last one."""
    connection = await connect(url, options="", prepares=False, password=None)
    try:
        answers = await connection.run(list(map(Statement, statements)))
    finally:
        connection.close()
    return answers[-1].rows


def record_trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets, for each round trip, how many statements it has."""
    trips: list[int] = []
    run = Connection.run

    async def recording(self: Connection, statements: Sequence[Statement]) -> list[Answer]:
        trips.append(len(statements))
        return await run(self, statements)

    monkeypatch.setattr(Connection, "run", recording)
    return trips
