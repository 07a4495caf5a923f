"""Migrations: the numbered scripts under schema/, applied in order, each once (SPEC 5.6)."""

from __future__ import annotations

import sqlite3
from importlib.resources import files

from conveyor.engines.embedded.errors import WrongSchema


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the database to this program's version; refuses one that is ahead of it."""
    version = version_of(connection)
    scripts = load_scripts()
    if version > len(scripts):
        raise WrongSchema(
            f"the database has schema version {version}, but this Conveyor knows only up to "
            f"{len(scripts)}: it was written by a newer release, use that one"
        )
    for number, script in enumerate(scripts[version:], start=version + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;"
        )


def check_current(connection: sqlite3.Connection) -> None:
    """For those who only join: the owner migrates, and must be of the same release."""
    version, wanted = version_of(connection), len(load_scripts())
    if version != wanted:
        raise WrongSchema(
            f"the database has schema version {version}, this Conveyor works with {wanted}: "
            "its owner must be started first, from the same release"
        )


def version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def load_scripts() -> list[str]:
    schema = files("conveyor.engines.embedded") / "schema"
    scripts = {
        int(entry.name.split("_")[0]): entry.read_text(encoding="utf-8")
        for entry in schema.iterdir()
        if entry.name.endswith(".sql")
    }
    # A number that nobody has used changes nothing.
    return [scripts.get(number, "") for number in range(1, max(scripts) + 1)]
