"""The embedded engine: every durable port on one data directory
(docs/engines.md, Embedded engine)."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.run.settlement import RETRY_AFTER_S_MAX
from conveyor.engines.executor import DiskExecutor, ThreadExecutor, sync_directory
from conveyor.engines.sqlite.blobs import FileBlobs
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.engines.sqlite.database import Health, check_current, migrate, open_database
from conveyor.engines.sqlite.disk_space import Space, rewrite_once
from conveyor.engines.sqlite.errors import (
    DataDirInUse,
    DataDirUnusable,
    WrongSchema,
    is_full,
    unusable,
)
from conveyor.engines.sqlite.migration import refuse_migrated
from conveyor.engines.sqlite.queue import SqliteQueue, sweep
from conveyor.engines.sqlite.store import SqliteStore
from conveyor.ports.clock import Clock

log = logging.getLogger(__name__)

_DATABASE = "conveyor.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedEngine:
    """The ports of one data directory. They share one database and must be used together."""

    store: SqliteStore
    queue: SqliteQueue
    blobs: FileBlobs
    coordinator: SqliteCoordinator
    health: Health


@asynccontextmanager
async def open_engine(
    data_dir: Path,
    *,
    clock: Clock,
    random: Random,
    owner: str,
    executor: DiskExecutor | None = None,
    migration_id: str | None = None,
) -> AsyncIterator[EmbeddedEngine]:
    """Opens the directory as its owner: creates or migrates it, and recovers.

    `owner` is the role that other processes are shown. Raises DataDirInUse if another process owns
    the directory, and DataDirUnusable if it was migrated to another engine, unless by
    `migration_id`.
    """

    def prepare(connection: sqlite3.Connection) -> None:
        # The order matters: recovery uses the current schema.
        migrate(connection)
        rewrite_once(connection, space)
        _recover_if_there_is_room(connection, clock)

    executor = executor or ThreadExecutor()
    space = Space(data_dir, executor)
    # The lock comes before any other access: recovery frees the claims of all other processes.
    with lock_directory(data_dir, role=owner, now=clock.now()):
        refuse_migrated(data_dir, except_id=migration_id)
        await executor.run(_make_places, data_dir, space)
        async with _serving(data_dir, prepare, clock, random, executor) as engine:
            yield engine


@asynccontextmanager
async def join_engine(
    data_dir: Path, *, clock: Clock, random: Random, executor: DiskExecutor | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """Opens a directory that another process owns. Raises WrongSchema if it is not ready."""
    if not (data_dir / _DATABASE).exists():
        raise WrongSchema(f"{data_dir} has no database yet: start its owner first")
    refuse_migrated(data_dir)
    async with _serving(
        data_dir, check_current, clock, random, executor or ThreadExecutor()
    ) as engine:
        yield engine


@asynccontextmanager
async def _serving(
    data_dir: Path,
    prepare: Callable[[sqlite3.Connection], None],
    clock: Clock,
    random: Random,
    executor: DiskExecutor,
) -> AsyncIterator[EmbeddedEngine]:
    space = Space(data_dir, executor)
    async with open_database(data_dir / _DATABASE, prepare, executor, space) as database:
        blobs = FileBlobs(data_dir, random, executor, space)
        try:
            yield EmbeddedEngine(
                store=SqliteStore(database, clock, space),
                queue=SqliteQueue(database, clock),
                blobs=blobs,
                coordinator=SqliteCoordinator(database, clock, random),
                health=database.health,
            )
        finally:
            # Shielded: the threads write into the directory, which the next owner may lock as soon
            # as this context ends.
            with trio.CancelScope(shield=True):
                await blobs.wait_until_at_rest()


def _recover_if_there_is_room(connection: sqlite3.Connection, clock: Clock) -> None:
    """Recovers, unless the disk is full.

    A full directory is served too, so that callers can read and delete. What ended processes held
    then lapses by itself.
    """
    try:
        recover(connection, now=clock.now(), steady=clock.steady())
    except sqlite3.Error as error:
        if not is_full(error):
            raise
        if connection.in_transaction:
            connection.rollback()
        log.warning("the disk is full: claims of ended processes lapse by themselves")


def _make_places(data_dir: Path, space: Space) -> None:
    """Makes the private directories for bodies, and removes bodies that were never finished."""
    try:
        take_files_from_others(data_dir)
        for name in ("blobs", "temp"):
            make_private_directory(data_dir / name)
        # This process has the owner lock and has started no put: all of these are left-overs.
        for entry in os.scandir(data_dir / "temp"):
            os.unlink(entry)
        space.prepare()
        for directory in (data_dir, data_dir.absolute().parent):
            sync_directory(str(directory))
    except OSError as error:
        raise unusable(data_dir, error) from error


# Recovery: a new owner frees the claims, messages and leases of processes that have ended
# (docs/engines.md, Ownership and recovery).
#
# There is one owner at a time, and it opens the data directory before other processes join. So a
# message that was received and not acked at that moment belongs to a process that has ended.
# Recovery reads these messages and not all tasks, so its cost does not grow with their number.


# Messages use the steady clock, which restarts with the machine. A `visible_at` from before a
# restart may therefore be far in the future. A message that was never received has no reason to
# wait, and no bounce hides a message for longer than the longest retry delay.

# Claims of messages that were received and are still hidden. A message whose time is over is
# visible again without recovery, and its claim lapses without it too.
_LAPSE_CLAIMS = """
UPDATE tasks SET claim_until = 0 WHERE claim_until > 0 AND rowid IN (
    SELECT tasks.rowid
    FROM queues
    CROSS JOIN messages USING (queue_id)
    CROSS JOIN tasks USING (run_id, task_id)
    WHERE messages.visible_at > :steady AND messages.in_hand = 1
)
"""
_SHOW_MESSAGES = """
UPDATE messages SET visible_at = :steady, in_hand = 0 WHERE message_id IN (
    SELECT message_id
    FROM queues
    CROSS JOIN messages USING (queue_id)
    WHERE visible_at > :steady
    AND (in_hand = 1 OR receives = 0 OR visible_at > :steady + :delay_s_max)
)
"""
_LAPSE_KEYS = """
UPDATE key_records SET claimed_until = 0 WHERE response_status IS NULL AND claimed_until > 0
"""

# A finished export is due when it expires. An unfinished one is due when its claim ends.
_LAPSE_EXPORTS = """
UPDATE exports SET due_at = :now WHERE due_at > :now AND due_at < expires_at
"""
# Deletions that an ended process had claimed, and deletions that are due within a claim's time.
_LAPSE_DELETIONS = """
UPDATE scrubs SET due_at = :now WHERE due_at > :now AND due_at <= :now + :claim_s
"""


def recover(connection: sqlite3.Connection, *, now: float, steady: float) -> None:
    """Frees what ended processes held. `now` is of the wall clock, `steady` of the steady clock."""
    # Claims first: `_SHOW_MESSAGES` clears `in_hand`, by which `_LAPSE_CLAIMS` finds its tasks.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_LAPSE_CLAIMS, {"steady": steady})
    connection.execute(_SHOW_MESSAGES, {"steady": steady, "delay_s_max": RETRY_AFTER_S_MAX})
    connection.execute(_LAPSE_EXPORTS, {"now": now})
    connection.execute(_LAPSE_DELETIONS, {"now": now, "claim_s": limits.DELETION_CLAIM_S})
    connection.execute(_LAPSE_KEYS)
    connection.execute("DELETE FROM leases")
    connection.execute("DELETE FROM marks")
    closed = connection.execute("SELECT queue_id FROM queues WHERE run_id IS NULL").fetchall()
    connection.execute("COMMIT")
    # Outside the transaction: a closed queue may be long, and each slice commits by itself.
    for (queue_id,) in closed:
        while sweep(connection, queue_id):
            pass


# The owner lock: one process at a time owns a data directory.
#
# The kernel holds the lock and releases it when the process ends, however it ends. `owner.json` is
# only information about the owner for error messages.


class Owner(msgspec.Struct, frozen=True):
    pid: int
    role: str
    started_at: float


@contextmanager
def lock_directory(data_dir: Path, *, role: str, now: float) -> Iterator[None]:
    """Locks the directory, and creates it if missing. DataDirInUse if another process has it."""
    lock = _open_lock(data_dir)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(data_dir) from error
        write_owner_file(data_dir, Owner(pid=os.getpid(), role=role, started_at=now))
        yield
    finally:
        # Closing releases the lock. The file stays: if it were removed, two processes could each
        # lock a file of that name.
        os.close(lock)


def _open_lock(data_dir: Path) -> int:
    try:
        make_private_directory(data_dir)
        return os.open(data_dir / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataDirUnusable(
            f"{data_dir} cannot be used as the data directory ({error.strerror}): "
            "choose another with CONVEYOR_DATA_DIR"
        ) from error


def write_owner_file(data_dir: Path, owner: Owner) -> None:
    """Writes `owner.json`. If that fails (a full disk), removes it.

    No file is better than a file that names the previous owner.
    """
    draft = data_dir / "owner.json.new"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(owner))
        # Atomic: a process that is refused never reads half a file.
        draft.replace(data_dir / "owner.json")
    except OSError:
        for path in (draft, data_dir / "owner.json"):
            path.unlink(missing_ok=True)


def _in_use(data_dir: Path) -> DataDirInUse:
    try:
        owner = msgspec.json.decode((data_dir / "owner.json").read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError):  # The owner has the lock, but no file yet.
        return DataDirInUse(f"{data_dir} is in use by another process", pid=None)
    who = f"{owner.role}, process {owner.pid}"
    return DataDirInUse(
        f"{data_dir} is in use by another Conveyor ({who}): "
        "stop it, or choose another directory with CONVEYOR_DATA_DIR",
        pid=owner.pid,
    )


# Privacy of a data directory: only its user can read the files in it.
#
# URLs, metadata and bodies are callers' data. All files are created with a private mode. Files that
# an earlier release or another program left readable are made private at the next start.


log = logging.getLogger(__name__)

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (nothing is put there)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_directory(directory: Path) -> None:
    """Creates the directory if it is missing, and removes the rights of all other users."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    take_from_others(directory)


def take_from_others(path: Path) -> None:
    """Removes all rights of group and others to the file or directory.

    A path that belongs to another user is left unchanged, with a warning: the files that are made
    inside are private anyway. A directory that all users share, such as /tmp, is left unchanged
    too. The root of a volume often has the mode of a shared directory. It does not count as shared
    while it contains no file of another user.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & _OTHERS:
        return
    if mode & stat.S_ISVTX and _is_shared(path):
        log.warning("the data directory is shared with all users", extra={"path": str(path)})
        return
    try:
        os.chmod(path, mode & ~_OTHERS)
    except PermissionError as error:
        log.warning(
            "the data directory belongs to another user, who can open it",
            extra={"path": str(path), "cause": error.strerror},
        )


def _is_shared(directory: Path) -> bool:
    resolved = directory.resolve()
    if resolved in {Path(place).resolve() for place in (*_TEMPORARY, tempfile.gettempdir())}:
        return True
    return any(
        entry.stat(follow_symlinks=False).st_uid != os.getuid() for entry in _entries(resolved)
    )


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def take_files_from_others(directory: Path) -> None:
    """Makes the files directly in the directory private. Its subdirectories are private already."""
    for entry in _entries(directory):
        if entry.is_file(follow_symlinks=False):
            take_from_others(Path(entry.path))
