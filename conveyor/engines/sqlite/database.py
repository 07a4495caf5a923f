"""The database: one SQLite file in WAL mode, one writer with group commit, and readers
(docs/engines.md, Embedded engine).

A read of one row by its key runs on the Trio thread and takes 30 us; the two hops to a thread and
back alone take 160 us. A read that may return many rows runs in a thread.
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

from conveyor.engines.executor import DiskExecutor
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
from conveyor.engines.sqlite.transactions import Op, T, TransactionCommitter
from conveyor.ports.errors import Unavailable

# CPython's default is 5 ms. With it, the writer thread may starve behind a busy Trio thread
# (figures in transactions.py). A shorter interval causes more thread switches.
_SWITCH_INTERVAL_S = 0.0001
# Concurrent reads in threads. Each reader keeps a connection and a page cache of its own.
_READERS_MAX = 4
# The writer touches the pages of all runs, a reader those of one query.
WRITER_CACHE_KIB = 49152
_READER_CACHE_KIB = 4096
_SQLITE_MIN = (3, 37, 0)  # The first release with STRICT tables.
# How long a reader, or the opening of the file, waits for another process. Then the caller gets
# Unavailable.
_BUSY_MS = 10_000
# SQLite copies the write-ahead log into the database after so many pages. A large number copies
# less often. A small number keeps the log short, which matters while the disk is full.
_CHECKPOINT_PAGES = 4000
_FULL_CHECKPOINT_PAGES = 250
# Steps of the vacuum per call of `tidy`. Without a limit, the removal of a hundred thousand rows
# would delay all other writers for as long as it takes.
_SHRINK_STEPS_MAX = 32
# An unused write-ahead log longer than this is truncated. Truncating a shorter one saves nothing:
# the next writes make it as long again.
_LOG_BYTES_MAX = 1024 * 1024
# The page caches are emptied at every sixth call of `tidy`, once a minute. Otherwise they fill with
# pages of jobs that are gone, 1.5 MB for 1,000 jobs, until they reach their limits. What is still
# needed is read again from the system's cache: 12,000 pages in 40 ms for a full writer's cache.
_TIDIES_PER_RELEASE = 6
# The vacuum is optional work. It gives up early when the write lock is taken; the next call of
# `tidy` tries again.
_TIDY_BUSY_MS = 1000

PRAGMAS = (
    # NORMAL would be faster in WAL mode, but may lose the last commits in a power cut. The law of
    # the store is that Applied means durable.
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA temp_store = MEMORY",
    # Deleted content is overwritten with zeros where that needs no further page write.
    "PRAGMA secure_delete = FAST",
    f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}",
)


class Database:
    """A read sees all commits that were made before it, by any process."""

    def __init__(
        self, connection: Connection, path: Path, executor: DiskExecutor, space: Space
    ) -> None:
        writer = TransactionCommitter(
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
        self._tidies = 0
        self._path = path
        self._executor = executor
        # For reads on the Trio thread. It never waits for a lock (see `read_inline`).
        self._glancing = _connect_reader(path, busy_ms=0)
        self._readers: list[Connection] = []
        self._limiter = trio.CapacityLimiter(_READERS_MAX)

    async def read_inline(self, op: Op[T]) -> T:
        """Runs a read of a few pages on the Trio thread."""
        await trio.lowlevel.checkpoint()
        try:
            return op(self._glancing)
        except sqlite3.Error as error:
            # This connection has no busy timeout, because the Trio thread must not block. If the
            # file is locked, a thread repeats the read and waits for the lock.
            if not is_busy(error):
                self.health.note(error)
                raise_translated(error)
        return await self.read(op)

    async def read(self, op: Op[T]) -> T:
        """Runs a read in a thread."""
        try:
            return await self._executor.run(self._read, op, limiter=self._limiter)
        except sqlite3.Error as error:
            self.health.note(error)
            raise_translated(error)

    def _on_error(self, error: BaseException) -> bool:
        """Returns whether to retry the group: the disk was full, and the reserve was freed."""
        self.health.note(error)
        return is_full(error) and self._make_room()

    def _make_room(self) -> bool:
        self._is_short_of_room = True
        self._writing.execute(f"PRAGMA wal_autocheckpoint = {_FULL_CHECKPOINT_PAGES}")
        return self._space.release()

    async def tidy(self) -> None:
        """Returns unused disk space (pages of the file, a long log) and memory of the page caches,
        and restores the reserve."""
        if self._space.restore() and self._is_short_of_room:
            self._is_short_of_room = False
            pragma = f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}"
            await self.write(lambda connection: connection.execute(pragma))
        self._tidies += 1
        if self._tidies % _TIDIES_PER_RELEASE == 0:
            await self._release_memory()
        # Resting means: this process has written nothing since the previous call.
        changes = self._writing.total_changes
        is_resting, self._changes_seen = changes == self._changes_seen, changes
        try:
            await self._executor.run(_tidy_file, self._path, is_resting)
        except sqlite3.Error as error:
            if not is_busy(error):
                self.health.note(error)
                raise_translated(error)

    async def _release_memory(self) -> None:
        await self.write(_empty_cache)
        # A reader that is missing from the list is in use; it is emptied another time.
        for connection in (self._glancing, *self._readers):
            _empty_cache(connection)

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
    path: Path, prepare: Callable[[Connection], None], executor: DiskExecutor, space: Space
) -> AsyncIterator[Database]:
    """Opens the file, runs `prepare` before any other access, and closes the file cleanly."""
    connection = await executor.run(_open_prepared, path, prepare, space)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        database = Database(connection, path, executor, space)
        try:
            yield database
        finally:
            # Shielded: a cancelled close would release the connection while the writer thread
            # still uses it. The empty write ends after the group that is being committed.
            with trio.CancelScope(shield=True):
                await database.write(lambda _: None)
            database.close()
    finally:
        sys.setswitchinterval(interval_s)
        with trio.CancelScope(shield=True):
            # The last connection that closes copies the log into the database. That may take long,
            # so it runs in a thread; it is shielded, because a half-closed connection leaks.
            await executor.run(connection.close)


def _open_prepared(path: Path, prepare: Callable[[Connection], None], space: Space) -> Connection:
    if sqlite3.sqlite_version_info < _SQLITE_MIN:
        raise SqliteTooOld(f"SQLite {sqlite3.sqlite_version} is too old: 3.37 is needed")
    with ExitStack() as on_failure:
        try:
            _make_private_file(path)
            connection = _connect(path, cache_kib=WRITER_CACHE_KIB, busy_ms=_BUSY_MS)
            on_failure.callback(connection.close)
            # This pragma takes effect only on a file without tables, so it comes before the
            # migrations. An older file keeps its mode (see `rewrite_once` in disk_space.py).
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            _prepare(connection, prepare, space)
            # From now on this connection is used on the Trio thread. The group committer waits for
            # the lock in a thread instead (`start_when_unlocked`).
            connection.execute("PRAGMA busy_timeout = 0")
        except (sqlite3.Error, OSError) as error:
            if is_busy(error):
                raise Unavailable(f"SQLite: {error}") from error
            raise unusable(path, error) from error
        on_failure.pop_all()
    return connection


def _prepare(connection: Connection, prepare: Callable[[Connection], None], space: Space) -> None:
    """Runs `prepare`, and once more with the reserve freed if the disk is full.

    The process must be able to open a full directory: otherwise no API call can delete anything.
    """
    try:
        prepare(connection)
    except sqlite3.Error as error:
        if not is_full(error) or not space.release():
            raise
        if connection.in_transaction:
            connection.rollback()
        prepare(connection)


def _tidy_file(path: Path, is_resting: bool) -> None:
    """Vacuums and truncates the log, in a thread, on a connection of its own.

    The writer waits for its transactions as it waits for those of another process.
    """
    connection = _connect(path, cache_kib=_READER_CACHE_KIB, busy_ms=_TIDY_BUSY_MS)
    try:
        steps = 0
        while steps < _SHRINK_STEPS_MAX and disk_space.free_pages(connection):
            disk_space.shrink_step(connection)
            steps += 1
        # The file itself becomes shorter only with the checkpoint, so a checkpoint follows each
        # vacuum. Otherwise only an unused log is truncated: a process that continues to write
        # would make it as long again at once.
        is_long = os.stat(f"{path}-wal").st_size > _LOG_BYTES_MAX
        if steps or (is_resting and is_long):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def _empty_cache(connection: Connection) -> None:
    connection.execute("PRAGMA shrink_memory")


def _make_private_file(path: Path) -> None:
    """Creates the database file with mode 0600 if it does not exist.

    SQLite gives its log and its shared memory the mode of the database. An existing file is not
    opened here: closing any descriptor of it would drop the POSIX locks of this process.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _connect_reader(path: Path, *, busy_ms: int) -> Connection:
    connection = _connect(path, cache_kib=_READER_CACHE_KIB, busy_ms=busy_ms)
    # A write on this connection would be outside the group commit. SQLite refuses it.
    connection.execute("PRAGMA query_only = ON")
    return connection


def _connect(path: Path, *, cache_kib: int, busy_ms: int) -> Connection:
    # No isolation level: Python would begin transactions itself, and the group committer controls
    # them. No thread check: the Trio thread and the writer thread use the connection in turns. 512
    # prepared statements: with fewer, rare shapes of statements may be parsed again.
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
    """Whether the database is damaged or has an I/O error. Each is logged once.

    Damage lasts until the process restarts on a repaired file. An I/O error lasts until the next
    successful commit, so it is logged as a warning only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_damaged = False
        self._has_io_error = False

    def is_sound(self) -> bool:
        return not self._is_damaged and not self._has_io_error

    def note(self, error: BaseException) -> None:
        """Records damage or an I/O error if this error of SQLite means one."""
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
        # A successful commit proves that the disk works again. Damage is not reset by it: other
        # pages of the file may still be damaged.
        if self._has_io_error:
            self._has_io_error = False
            log.warning("the database can be written again", extra={"path": str(self._path)})


# Migrations: the numbered scripts under schema/, applied in order, each once
# (docs/storage.md, SQLite files).


_SCHEMA = Path(__file__).with_name("schema")


def migrate(connection: sqlite3.Connection) -> None:
    """Migrates the database to this program's version. Refuses a newer database."""
    # A newer database is refused before any write: this release does not know its columns.
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
        # One transaction for all scripts and the version: after a crash the database has either
        # the old schema or the new one.
        changes = "\n".join(due)
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{changes}\nPRAGMA user_version = {newest};\nCOMMIT;"
        )


def check_current(connection: sqlite3.Connection) -> None:
    """Checks the version for a process that joins. Only the owner migrates."""
    version, newest = version_of(connection), max(load_scripts())
    if version != newest:
        raise WrongSchema(
            f"the database has schema version {version}, this Conveyor works with {newest}: "
            "its owner must be started first, from the same release"
        )


def version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def load_scripts() -> dict[int, str]:
    """Returns the scripts by number, in order."""
    scripts = sorted(_SCHEMA.glob("*.sql"))
    numbers = [int(script.name.split("_")[0]) for script in scripts]
    assert numbers == list(range(1, len(scripts) + 1)), numbers
    return {
        number: script.read_text(encoding="utf-8")
        for number, script in zip(numbers, scripts, strict=True)
    }
