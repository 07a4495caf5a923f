"""Migrations of data of an earlier release."""

from __future__ import annotations

import sqlite3

from conveyor.domain.changes import NoticeKey
from conveyor.engines.sqlite.database import load_scripts, migrate
from conveyor.engines.sqlite.sql import TABLES, columns_sql
from tests.builders import T0

NOTICES = TABLES[NoticeKey]


def test_a_notice_of_the_first_release_keeps_the_rest_of_its_time() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(f"{load_scripts()[1]}\nPRAGMA user_version = 1;")
    connection.execute(
        "INSERT INTO notices VALUES ('N', 'J', 'R', 'run.completed', ?, ?, ?, '{}', 2, 'timeout')",
        ("due", T0, T0 + 30),
    )

    migrate(connection)

    (row,) = connection.execute(f"SELECT {columns_sql(NOTICES)} FROM notices").fetchall()
    notice = NOTICES.from_row(row)
    assert (notice.occurred_at, notice.due_since, notice.due_at) == (T0, T0, T0 + 30)
    assert (notice.attempts, notice.claim, notice.tries) == (2, 0, ())
