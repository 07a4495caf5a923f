"""Database: one SQLite file in WAL mode, a writer with group commit, and readers
(docs/engines.md, Embedded engine).

A row by its key is read where the caller stands, on the Trio thread: 30 us, where a thread takes
160 us to come and go. Anything that may read many rows goes to a thread.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from sqlite3 import Connection

import trio

from conveyor.engines.sqlite import disk_space
from conveyor.engines.sqlite.disk_space import Space
from conveyor.engines.sqlite.errors import (
    SqliteTooOld,
    WrongSchema,
    is_busy,
    is_damage,
    is_full,
    is_io_error,
    raise_translated,
    unusable,
)
from conveyor.engines.sqlite.executor import BlockingExecutor
from conveyor.engines.sqlite.group_commit import GroupCommitter, Op, T
from conveyor.ports.errors import Unavailable

_SWITCH_INTERVAL_S = 0.0001
_READERS_MAX = 4
WRITER_CACHE_KIB = 49152
_READER_CACHE_KIB = 4096
_SQLITE_MIN = (3, 37, 0)  # STRICT tables.
_BUSY_MS = 10_000
# Pages of the log after which it is copied into the database: many save work; while the disk is
# full, few keep the log short.
_CHECKPOINT_PAGES = 4000
_FULL_CHECKPOINT_PAGES = 250
# In one go, so that rows that go by the hundred thousand do not hold up everything else.
_SHRINK_STEPS_MAX = 32
# A log that rests is cut off above this: below, it would only be grown again.
_LOG_BYTES_MAX = 1024 * 1024
_TIDY_BUSY_MS = 1000

PRAGMAS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA temp_store = MEMORY",
    # What was deleted is overwritten where that costs no further page.
    "PRAGMA secure_delete = FAST",
    f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}",
)


class Database:
    """Reads see whatever was committed before them, by any process."""

    def __init__(
        self, connection: Connection, path: Path, executor: BlockingExecutor, space: Space
    ) -> None:
        writer = GroupCommitter(
            connection, executor, on_error=self._on_error, on_commit=self._on_commit
        )
        self.write = writer.write
        self.write_batched = writer.write_batched
        self.write_early = writer.write_early
        self.health = Health(path)
        self._writing = connection
        self._space = space
        self._is_short_of_room = False
        self._changes_seen = -1
        self._path = path
        self._executor = executor
        self._glancing = _connect_reader(path, busy_ms=0)
        self._readers: list[Connection] = []
        self._limiter = trio.CapacityLimiter(_READERS_MAX)

    async def read_inline(self, op: Op[T]) -> T:
        """Runs a read of a few pages, here and now."""
        await trio.lowlevel.checkpoint()
        try:
            return op(self._glancing)
        except sqlite3.Error as error:
            if not is_busy(error):
                self.health.note(error)
                raise_translated(error)
        return await self.read(op)

    async def read(self, op: Op[T]) -> T:
        """Runs a read aside."""
        try:
            return await self._executor.run(self._read, op, limiter=self._limiter)
        except sqlite3.Error as error:
            self.health.note(error)
            raise_translated(error)

    def _on_error(self, error: BaseException) -> bool:
        """Whether a failed group may try again: the disk is full, and the reserve made room."""
        self.health.note(error)
        return is_full(error) and self._make_room()

    def _make_room(self) -> bool:
        self._is_short_of_room = True
        self._writing.execute(f"PRAGMA wal_autocheckpoint = {_FULL_CHECKPOINT_PAGES}")
        return self._space.release()

    async def tidy(self) -> None:
        """Gives back what is not needed: pages of the file, a long log; makes the reserve again."""
        if self._space.restore() and self._is_short_of_room:
            self._is_short_of_room = False
            pragma = f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}"
            await self.write(lambda connection: connection.execute(pragma))
        changes = self._writing.total_changes
        is_resting, self._changes_seen = changes == self._changes_seen, changes
        try:
            await self._executor.run(_tidy_file, self._path, is_resting)
        except sqlite3.Error as error:
            if not is_busy(error):
                self.health.note(error)
                raise_translated(error)

    def _on_commit(self) -> None:
        self.health.note_commit()

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
    path: Path, prepare: Callable[[Connection], None], executor: BlockingExecutor, space: Space
) -> AsyncIterator[Database]:
    """Opens the file, has `prepare` look after it before anybody else, and closes it cleanly."""
    connection = await executor.run(_prepared, path, prepare, space)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        database = Database(connection, path, executor, space)
        try:
            yield database
        finally:
            with trio.CancelScope(shield=True):
                await database.write(lambda _: None)  # Waits for the group being written.
            database.close()
    finally:
        sys.setswitchinterval(interval_s)
        with trio.CancelScope(shield=True):
            # The last one to close copies the log into the database.
            await executor.run(connection.close)


def _prepared(path: Path, prepare: Callable[[Connection], None], space: Space) -> Connection:
    if sqlite3.sqlite_version_info < _SQLITE_MIN:
        raise SqliteTooOld(f"SQLite {sqlite3.sqlite_version} is too old: 3.37 is needed")
    with ExitStack() as on_failure:
        try:
            _make_private_file(path)
            connection = _connect(path, cache_kib=WRITER_CACHE_KIB, busy_ms=_BUSY_MS)
            on_failure.callback(connection.close)
            # Holds for a file without tables; an older one keeps what it has (see vacuum.py).
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            _prepare(connection, prepare, space)
            connection.execute("PRAGMA busy_timeout = 0")  # The writer does its own waiting.
        except (sqlite3.Error, OSError) as error:
            if is_busy(error):
                raise Unavailable(f"SQLite: {error}") from error
            raise unusable(path, error) from error
        on_failure.pop_all()
    return connection


def _prepare(connection: Connection, prepare: Callable[[Connection], None], space: Space) -> None:
    """Once more with the reserve where the disk is full: an owner comes to delete something."""
    try:
        prepare(connection)
    except sqlite3.Error as error:
        if not is_full(error) or not space.release():
            raise
        if connection.in_transaction:
            connection.rollback()
        prepare(connection)


def _tidy_file(path: Path, is_resting: bool) -> None:
    """On a connection of its own: the writer waits for it as for another process."""
    connection = _connect(path, cache_kib=_READER_CACHE_KIB, busy_ms=_TIDY_BUSY_MS)
    try:
        steps = 0
        while steps < _SHRINK_STEPS_MAX and disk_space.free_pages(connection):
            disk_space.shrink_step(connection)
            steps += 1
        # The file itself shrinks with the log. Who writes on fills that again at once.
        is_long = os.stat(f"{path}-wal").st_size > _LOG_BYTES_MAX
        if steps or (is_resting and is_long):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def _make_private_file(path: Path) -> None:
    """SQLite gives its log and its shared memory the mode of the database. A file that exists is
    not opened: to close it again would drop the locks of this process."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


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


# Health: whether the database of a data directory can be read and written
# (docs/engines.md, Room and damage).


log = logging.getLogger(__name__)


class Health:
    """Damage stays until the process is started again on a file that was mended; an I/O error is
    over with the next commit that succeeds, and so is only a warning. Each is logged once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_damaged = False
        self._has_io_error = False

    def is_sound(self) -> bool:
        return not self._is_damaged and not self._has_io_error

    def note(self, error: BaseException) -> None:
        """Keeps in mind what this error of SQLite says about the file."""
        if is_damage(error) and not self._is_damaged:
            self._is_damaged = True
            log.error(
                "the database is damaged: stop this process, copy the data directory, then restore "
                "a backup or try the .recover command of sqlite3",
                extra={"path": str(self._path), "cause": str(error)},
            )
        if is_io_error(error) and not self._has_io_error:
            self._has_io_error = True
            log.warning(
                "the disk of the database fails: see the system log for its device",
                extra={"path": str(self._path), "cause": str(error)},
            )

    def note_commit(self) -> None:
        if self._has_io_error:
            self._has_io_error = False
            log.warning("the database can be written again", extra={"path": str(self._path)})


# Migrations: the numbered scripts under schema/, applied in order, each once
# (docs/storage.md, SQLite files).


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
