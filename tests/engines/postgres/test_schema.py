"""Migrations: from the first version upwards, by several processes at once."""

from __future__ import annotations

import pytest
import trio

from conveyor.engines.postgres.connection import Statement
from conveyor.engines.postgres.database import DatabaseConfig, open_database
from conveyor.engines.postgres.engine import create_tables
from conveyor.engines.postgres.errors import NotSetUp
from conveyor.engines.postgres.schema import check_current, load_scripts, migrate
from conveyor.engines.postgres.sql import TABLES
from tests.postgres import a_schema
from tests.servers import Postgres

_COLUMNS = """
SELECT column_name FROM information_schema.columns
WHERE table_schema = current_schema() AND table_name = $1
"""


async def test_each_version_migrates_to_the_newest(server: Postgres) -> None:
    scripts = load_scripts()

    for version in range(len(scripts) + 1):
        config = DatabaseConfig(url=await a_schema(server.url))
        async with open_database(config) as database:
            await migrate(database, {n: text for n, text in scripts.items() if n <= version})
            assert await migrate(database) == max(scripts)
            await check_current(database)


async def test_processes_that_start_at_once_migrate_once(server: Postgres) -> None:
    config = DatabaseConfig(url=await a_schema(server.url))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(create_tables, config)

    async with open_database(config) as database:
        answer = await database.read(Statement("SELECT version FROM schema_versions"))
    assert [version for (version,) in answer.rows] == sorted(load_scripts())


async def test_the_tables_have_the_columns_of_the_rows(url: str) -> None:
    async with open_database(DatabaseConfig(url=url)) as database:
        for table in TABLES.values():
            answer = await database.read(Statement(_COLUMNS, (table.name,)))
            assert {name for (name,) in answer.rows} == {*table.columns}, table.name


async def test_a_database_without_tables_is_refused_with_advice(server: Postgres) -> None:
    config = DatabaseConfig(url=await a_schema(server.url))

    async with open_database(config) as database:
        with pytest.raises(NotSetUp, match="conveyor init"):
            await check_current(database)


async def test_a_newer_schema_is_served(url: str) -> None:
    """A release is rolled out while processes of the one before go on working."""
    newer = max(load_scripts()) + 1

    async with open_database(DatabaseConfig(url=url)) as database:
        await database.run(Statement(f"INSERT INTO schema_versions VALUES ({newer})"))
        try:
            await check_current(database)
        finally:
            await database.run(Statement(f"DELETE FROM schema_versions WHERE version = {newer}"))
