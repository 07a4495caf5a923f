"""Why a data directory cannot be opened, and what SQLite's errors mean to callers (SPEC 5.6)."""

from __future__ import annotations

import errno
import sqlite3
from typing import NoReturn

from conveyor.domain.errors import ConveyorError
from conveyor.ports.errors import StorageFull, Unavailable


class DataDirInUse(ConveyorError):
    """Another process owns the data directory; `pid` is its number where it could be read."""

    def __init__(self, message: str, *, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class DataDirUnusable(ConveyorError):
    """The data directory cannot be made, or not be written to."""


class WrongSchema(ConveyorError):
    """The database was written by another version of Conveyor than this one can serve."""


class SqliteTooOld(ConveyorError):
    """The SQLite library of this Python lacks what the schema needs."""


# What the world does to a database. Anything else (a constraint, bad SQL) is our own mistake.
_WORLDLY = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOTADB,
    }
)
_PRIMARY_CODE = 0xFF
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_busy(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_BUSY


def raise_translated(error: sqlite3.Error) -> NoReturn:
    """Raises what the port promises for this error; our own mistakes come out as they are."""
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        raise StorageFull(f"SQLite: {error}") from error
    if code in _WORLDLY:
        raise Unavailable(f"SQLite: {error}") from error
    raise error


def raise_translated_os(error: OSError) -> NoReturn:
    if error.errno in _NO_ROOM:
        raise StorageFull(f"no room for a body: {error}") from error
    raise Unavailable(f"file system: {error}") from error


def _code(error: sqlite3.Error) -> int | None:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & _PRIMARY_CODE
