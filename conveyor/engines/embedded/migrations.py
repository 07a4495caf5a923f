"""Migrations: the numbered scripts under schema/, applied in order, each once
(docs/storage.md, SQLite files)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from conveyor.engines.embedded.errors import WrongSchema

_SCHEMA = Path(__file__).with_name("schema")


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the database to this program's version; refuses one that is ahead of it."""
    version = version_of(connection)
    scripts = load_scripts()
    newest = max(scripts)
    if version > newest:
        raise WrongSchema(
            f"the database has schema version {version}, but this Conveyor knows only up to "
            f"{newest}: it was written by a newer release, use that one"
        )
    due = [script for number, script in scripts.items() if number > version]
    if due:
        changes = "\n".join(due)
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{changes}\nPRAGMA user_version = {newest};\nCOMMIT;"
        )


def check_current(connection: sqlite3.Connection) -> None:
    """For those who only join: the owner migrates, and must be of the same release."""
    version, wanted = version_of(connection), max(load_scripts())
    if version != wanted:
        raise WrongSchema(
            f"the database has schema version {version}, this Conveyor works with {wanted}: "
            "its owner must be started first, from the same release"
        )


def version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def load_scripts() -> dict[int, str]:
    """The scripts by number, in order."""
    scripts = sorted(_SCHEMA.glob("*.sql"))
    numbers = [int(script.name.split("_")[0]) for script in scripts]
    assert numbers == list(range(1, len(scripts) + 1)), numbers
    return {
        number: script.read_text(encoding="utf-8")
        for number, script in zip(numbers, scripts, strict=True)
    }
