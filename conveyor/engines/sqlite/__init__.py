"""The embedded engine: SQLite and files, for one machine (docs/engines.md, Embedded engine)."""

from __future__ import annotations

from conveyor.engines.sqlite.engine import EmbeddedEngine, join_engine, open_engine
from conveyor.engines.sqlite.errors import DataDirInUse, SqliteTooOld, WrongSchema

__all__ = [
    "DataDirInUse",
    "EmbeddedEngine",
    "SqliteTooOld",
    "WrongSchema",
    "join_engine",
    "open_engine",
]
