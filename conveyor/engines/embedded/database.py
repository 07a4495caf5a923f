"""Database: one SQLite file in WAL mode, a writer with group commit, and readers (SPEC 5.6).

A row by its key is read where the caller stands, on the Trio thread: 30 us, where a thread takes
160 us to come and go. Anything that may read many rows goes to a thread.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from sqlite3 import Connection

import trio

from conveyor.engines.embedded.errors import SqliteTooOld, is_busy, raise_translated
from conveyor.engines.embedded.hands import Hands
from conveyor.engines.embedded.writer import Op, T, Writer

_SWITCH_INTERVAL_S = 0.0001
_READERS_MAX = 4
WRITER_CACHE_KIB = 49152
_READER_CACHE_KIB = 4096
_SQLITE_MIN = (3, 37, 0)  # STRICT tables.
_BUSY_MS = 10_000

PRAGMAS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA temp_store = MEMORY",
    # What was deleted is overwritten where that costs no further page.
    "PRAGMA secure_delete = FAST",
    "PRAGMA wal_autocheckpoint = 4000",
)


class Database:
    """Reads see whatever was committed before them, by any process."""

    def __init__(self, path: Path, writer: Writer, hands: Hands) -> None:
        self.write = writer.write
        self.write_in_company = writer.write_in_company
        self.apply = writer.apply
        self._path = path
        self._hands = hands
        self._glancing = _connect_reader(path, busy_ms=0)
        self._readers: list[Connection] = []
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
        """Runs a read aside."""
        try:
            return await self._hands.do(self._read, op, limiter=self._limiter)
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
    path: Path, prepare: Callable[[Connection], None], hands: Hands
) -> AsyncIterator[Database]:
    """Opens the file, has `prepare` look after it before anybody else, and closes it cleanly."""
    connection = await hands.do(_prepared, path, prepare)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        writer = Writer(connection, hands)
        database = Database(path, writer, hands)
        try:
            yield database
        finally:
            with trio.CancelScope(shield=True):
                await writer.write(lambda _: None)  # Whatever began to be written ends first.
            database.close()
    finally:
        sys.setswitchinterval(interval_s)
        with trio.CancelScope(shield=True):
            # The last one to close copies the log into the database.
            await hands.do(connection.close)


def _prepared(path: Path, prepare: Callable[[Connection], None]) -> Connection:
    if sqlite3.sqlite_version_info < _SQLITE_MIN:
        raise SqliteTooOld(f"SQLite {sqlite3.sqlite_version} is too old: 3.37 is needed")
    with ExitStack() as on_failure:
        try:
            connection = _connect(path, cache_kib=WRITER_CACHE_KIB, busy_ms=_BUSY_MS)
            on_failure.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            prepare(connection)
            connection.execute("PRAGMA busy_timeout = 0")  # The writer does its own waiting.
        except sqlite3.Error as error:
            raise_translated(error)
        on_failure.pop_all()
    return connection


def _connect_reader(path: Path, *, busy_ms: int) -> Connection:
    connection = _connect(path, cache_kib=_READER_CACHE_KIB, busy_ms=busy_ms)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _connect(path: Path, *, cache_kib: int, busy_ms: int) -> Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=512
    )
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        for pragma in PRAGMAS:
            connection.execute(pragma)
        connection.execute(f"PRAGMA cache_size = {-cache_kib}")
        connection.execute(f"PRAGMA busy_timeout = {busy_ms}")
        on_failure.pop_all()
    return connection
