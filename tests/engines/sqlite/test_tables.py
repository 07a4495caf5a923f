"""The schema has a table for each row kind, with its columns and its key."""

from __future__ import annotations

import sqlite3

import pytest

from conveyor.engines.sql_mapping import Table
from conveyor.engines.sqlite.database import migrate
from conveyor.engines.sqlite.sql import TABLES


@pytest.fixture
def connection() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    return connection


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_a_table_has_a_column_for_each_field(connection: sqlite3.Connection, table: Table) -> None:
    columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table.name})")]

    assert sorted(columns) == sorted(table.columns)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_a_row_is_found_by_its_key_through_an_index(
    connection: sqlite3.Connection, table: Table
) -> None:
    where = " AND ".join(f"{name} = 1" for name in table.key_columns)

    plan = connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {table.name} WHERE {where}")

    assert [step.split()[0] for *_, step in plan] == ["SEARCH"]


def test_tables_have_the_names_that_every_release_uses() -> None:
    assert sorted(table.name for table in TABLES.values()) == [
        "batches",
        "budgets",
        "crawl_steps",
        "crawls",
        "crossings",
        "events",
        "exports",
        "feeds",
        "job_inputs",
        "jobs",
        "key_records",
        "notices",
        "runs",
        "samples",
        "schedules",
        "scrubs",
        "shares",
        "signing_keys",
        "stats",
        "tasks",
    ]
