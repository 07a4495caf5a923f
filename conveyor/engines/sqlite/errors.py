"""Errors of the embedded engine: why a data directory cannot be opened, and the translation of
SQLite's and the file system's errors to those of the ports (docs/engines.md, Embedded engine)."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import NoReturn

from conveyor.domain.errors import ConveyorError
from conveyor.ports.errors import StorageDamaged, StorageFull, Unavailable


class DataDirInUse(ConveyorError):
    """Another process owns the data directory; `pid` is its number where it could be read."""

    def __init__(self, message: str, *, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class DataDirUnusable(ConveyorError):
    """The data directory cannot be created or written."""


class WrongSchema(ConveyorError):
    """The database was written by another version of Conveyor than this one can serve."""


class SqliteTooOld(ConveyorError):
    """The SQLite library of this Python lacks what the schema needs."""


# Errors of the environment, which may pass. Any other code (a constraint, bad SQL) is a bug of this
# program and is raised unchanged.
_TRANSIENT = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
    }
)
# A retry does not help, and further writes could make it worse. See `Health` in database.py.
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY_CODE = 0xFF  # SQLite's extended codes keep the primary code in the low byte.
# With less free space SQLite cannot allocate its shared memory.
_OPENING_BYTES_MIN = 64 * 1024
# Errors of the medium or of its file system: reading again gives the same error.
_UNREADABLE = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_busy(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_BUSY


def is_full(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL


def is_damage(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) in _DAMAGE


def is_io_error(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_IOERR


def raise_translated(error: sqlite3.Error) -> NoReturn:
    """Raises the port's error for this error of SQLite. Bugs of this program stay unchanged."""
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        raise StorageFull(f"SQLite: {error}") from error
    if code in _DAMAGE:
        raise StorageDamaged(f"SQLite: {error}") from error
    if code in _TRANSIENT:
        raise Unavailable(f"SQLite: {error}") from error
    raise error


def unusable(place: Path, error: OSError | sqlite3.Error) -> DataDirUnusable:
    """Returns the error that explains why the directory cannot be opened, with advice."""
    cause = error.strerror if isinstance(error, OSError) else str(error)
    is_full_disk = is_full(error) or (is_io_error(error) and _has_no_room(place))
    if is_full_disk or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        advice = "the disk is full, free some room on it"
    elif is_damage(error):
        advice = "it is damaged or no database of Conveyor, restore a backup or use another place"
    else:
        advice = "check its owner, its mode and its disk, or use another place"
    return DataDirUnusable(f"{place} cannot be used ({cause}): {advice} (CONVEYOR_DATA_DIR)")


def _has_no_room(place: Path) -> bool:
    """SQLite reports an I/O error, not a full disk, if its shared memory has no space."""
    volume = os.statvfs(place.parent)
    return volume.f_bavail * volume.f_frsize < _OPENING_BYTES_MIN


def raise_translated_os(error: OSError) -> NoReturn:
    if error.errno in _NO_ROOM:
        raise StorageFull(f"no room for a body: {error}") from error
    if error.errno in _UNREADABLE:
        raise StorageDamaged(f"file system: {error}") from error
    raise Unavailable(f"file system: {error}") from error


def _code(error: sqlite3.Error) -> int | None:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & _PRIMARY_CODE
