"""A migration that adds the counters of retrying tasks and of body bytes to an older database."""

from __future__ import annotations

import sqlite3
from typing import Any

from conveyor.domain.changes import Row, StatsKey, TaskKey
from conveyor.domain.model import Result, TaskStatus
from conveyor.engines.sql_mapping import Table
from conveyor.engines.sqlite.database import load_scripts, migrate
from conveyor.engines.sqlite.sql import TABLES
from tests.builders import OTHER_RUN, T0, a_stats, a_task

INSIGHT = 7
STATS, TASKS = TABLES[StatsKey], TABLES[TaskKey]


def test_the_migration_counts_retrying_tasks() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for number, script in load_scripts().items():
        if number < INSIGHT:
            connection.executescript(script)
    connection.execute(f"PRAGMA user_version = {INSIGHT - 1}")
    between: dict[str, Any] = {"attempts": 1, "claim": 1}
    body = Result("key", 1, "sha", "text/html", 200)
    for task in (
        a_task(0),
        a_task(1, **between),
        a_task(2, **between, shard=1),
        a_task(3, **between, shard=1),
        a_task(4, **between, status=TaskStatus.PROCESSING, claim_until=T0 + 90),
        a_task(5, **between, status=TaskStatus.SUCCESSFUL, result=body),
        a_task(6, OTHER_RUN, **between),
    ):
        _insert(connection, TASKS, task, newer={"duplicate_of"})
    for stats in (a_stats(0), a_stats(1), a_stats(2), a_stats(0, OTHER_RUN)):
        _insert(connection, STATS, stats, newer={"retrying", "stored_bytes"})

    migrate(connection)

    rows = connection.execute("SELECT run_id, shard, retrying FROM stats ORDER BY 1, 2").fetchall()
    assert [count for _, _, count in rows] == [1, 2, 0, 1]
    # The bytes of bodies are counted from the rows that stored them.
    sizes = connection.execute("SELECT stored_bytes FROM stats ORDER BY run_id, shard").fetchall()
    assert sizes == [(1,), (0,), (0,), (0,)]


def _insert(connection: sqlite3.Connection, table: Table, row: Row, newer: set[str]) -> None:
    """Inserts a row without these newer columns."""
    values = dict(zip(table.columns, table.to_row(row), strict=True))
    names = [name for name in table.columns if name not in newer]
    columns, marks = ", ".join(f'"{name}"' for name in names), ", ".join("?" * len(names))
    statement = f"INSERT INTO {table.name} ({columns}) VALUES ({marks})"
    connection.execute(statement, [values[name] for name in names])
