"""The arm that other benches compare with: plain SQLite with our schema, in a minimal loop."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

TASK = """INSERT INTO tasks (run_id, task_id, shard, batch_id, "index", url, status, created_at,
    updated_at, method, claim, claim_until, attempts, handed_back, history, credits, cost_micros)
    VALUES (?, ?, 0, '0', ?, ?, 'p', 0, 0, 'GET', 0, 0, 0, 0, '[]', 0, 0)"""
MESSAGE = """INSERT INTO messages (queue_id, job_id, task_id, shard, visible_at, in_hand, receives)
    VALUES (1, ?, ?, 0, 0, 0, 0)"""
STATS = """INSERT INTO stats VALUES (?, ?, 0, 'o', ?, 0,0,0,0,0,0,0,0,0,0,0,0)"""
SETTLE = """UPDATE tasks SET status = 's', result = ?, history = ?, updated_at = ?,
    claim_until = 0 WHERE run_id = ? AND task_id = ? AND claim = 0"""
COUNT = """UPDATE stats SET done = done + 1, successful = successful + 1
    WHERE job_id = ? AND run_id = ? AND shard = 0"""
RESULT = '["jobs/x/runs/y/z/1",20000,"' + "0" * 64 + '","text/html",200]'
HISTORY = "[[1,1.5,2.5,null,0,0]]"


@contextmanager
def bare_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens a new database with Conveyor's schema and durability settings."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    schema = resources.files("conveyor.engines.sqlite") / "schema" / "0001_initial.sql"
    connection.executescript(schema.read_text())
    try:
        yield connection
    finally:
        connection.close()


def insert_run(connection: sqlite3.Connection, run_id: str, ids: Sequence[str]) -> None:
    """Inserts all rows of a run in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(STATS, ("j", run_id, len(ids)))
    connection.executemany(
        TASK, [(run_id, task, n, f"https://example.com/{n}") for n, task in enumerate(ids)]
    )
    connection.executemany(MESSAGE, [("j", task) for task in ids])
    connection.execute("COMMIT")


def settle(connection: sqlite3.Connection, run_id: str, ids: Sequence[str], group: int) -> None:
    """Updates each task and its counter, `group` tasks in a transaction."""
    for start in range(0, len(ids), group):
        connection.execute("BEGIN IMMEDIATE")
        for task in ids[start : start + group]:
            connection.execute(SETTLE, (RESULT, HISTORY, 2.5, run_id, task))
            connection.execute(COUNT, ("j", run_id))
        connection.execute("COMMIT")
