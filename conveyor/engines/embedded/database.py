"""Database: one SQLite file in WAL mode, a writer with group commit, and readers (SPEC 5.6).

A row by its key is read where the caller stands, on the Trio thread: 20 us, where a thread takes
200 us to come and go. Anything that may read many rows goes to a thread.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from conveyor.engines.embedded.errors import is_busy, raise_translated
from conveyor.engines.embedded.writer import Op, T, Writer

_SWITCH_INTERVAL_S = 0.0001  # See writer.py.
_READERS_MAX = 4
_BUSY_MS = 10_000

_PRAGMAS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA cache_size = -65536",
    "PRAGMA mmap_size = 1073741824",
    "PRAGMA temp_store = MEMORY",
    # What was deleted is overwritten where that costs no further page.
    "PRAGMA secure_delete = FAST",
    "PRAGMA wal_autocheckpoint = 4000",
)


class Database:
    """Reads see whatever was committed before them, by any process."""

    def __init__(self, path: Path, writer: Writer) -> None:
        self.write = writer.write
        self._path = path
        self._glancing = _connect_reader(path, busy_ms=0)
        self._readers: list[sqlite3.Connection] = []
        self._limiter = trio.CapacityLimiter(_READERS_MAX)

    async def glance(self, op: Op[T]) -> T:
        """Runs a read of a few pages, here and now."""
        await trio.lowlevel.checkpoint()
        try:
            return op(self._glancing)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise_translated(error)
        return await self.read(op)

    async def read(self, op: Op[T]) -> T:
        """Runs a read in a thread."""
        try:
            return await trio.to_thread.run_sync(self._read, op, limiter=self._limiter)
        except sqlite3.Error as error:
            raise_translated(error)

    def _read(self, op: Op[T]) -> T:
        try:
            connection = self._readers.pop()
        except IndexError:
            connection = _connect_reader(self._path, busy_ms=_BUSY_MS)
        try:
            return op(connection)
        finally:
            self._readers.append(connection)

    def close(self) -> None:
        for connection in (self._glancing, *self._readers):
            connection.close()


@asynccontextmanager
async def open_database(
    path: Path, prepare: Callable[[sqlite3.Connection], None]
) -> AsyncIterator[Database]:
    """Opens the file, has `prepare` look after it before anybody else, and closes it cleanly."""
    connection = await trio.to_thread.run_sync(partial(_prepared, path, prepare))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    writer = Writer(connection)
    database = Database(path, writer)
    try:
        yield database
    finally:
        sys.setswitchinterval(interval_s)
        with trio.CancelScope(shield=True):
            await writer.write(lambda _: None)  # Whatever began to be written ends first.
            database.close()
            # The last one to close copies the log into the database.
            await trio.to_thread.run_sync(connection.close)


def _prepared(path: Path, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    try:
        connection = _connect(path, busy_ms=_BUSY_MS)
        connection.execute("PRAGMA journal_mode = WAL")
        prepare(connection)
        connection.execute("PRAGMA busy_timeout = 0")  # The writer does its own waiting.
    except sqlite3.Error as error:
        raise_translated(error)
    return connection


def _connect(path: Path, *, busy_ms: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=512
    )
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    connection.execute(f"PRAGMA busy_timeout = {busy_ms}")
    return connection


def _connect_reader(path: Path, *, busy_ms: int) -> sqlite3.Connection:
    connection = _connect(path, busy_ms=busy_ms)
    connection.execute("PRAGMA query_only = ON")
    return connection
