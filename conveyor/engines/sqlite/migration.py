"""What a migration to another engine needs of a data directory: a mark that keeps other processes
out, its rows in the order of their keys, and its files of bodies
(docs/engines.md, Migration from SQLite to Postgres).
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from conveyor.domain.changes import RowKind
from conveyor.engines.executor import DiskExecutor, sync_directory
from conveyor.engines.packed_key import MARK
from conveyor.engines.sqlite.errors import DataDirInUse, DataDirUnusable, is_busy, unusable

_DATABASE = "conveyor.db"
_MARK_FILE = "migration.json"
_PIECE_BYTES = 1024 * 1024
# Links fail across file systems, and on those that have none.
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES})

Values = tuple[Any, ...]


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """The mark. From the first copied row on, the directory may not be served by anyone."""

    migration_id: str
    started_at: float


def find_migration(data_dir: Path) -> Migration | None:
    try:
        return msgspec.json.decode((data_dir / _MARK_FILE).read_bytes(), type=Migration)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataDirUnusable(f"{data_dir / _MARK_FILE} cannot be read: {error}") from error


def mark_migration(data_dir: Path, migration: Migration) -> None:
    """Marks the directory durably."""
    draft = data_dir / f"{_MARK_FILE}.new"
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(migration))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(data_dir / _MARK_FILE)
    sync_directory(str(data_dir))


def refuse_migrated(data_dir: Path, *, except_id: str | None = None) -> None:
    """Raises DataDirUnusable if a migration of the directory has begun.

    Tasks that another process did here would be done again, or lost, on the other engine.
    """
    migration = find_migration(data_dir)
    if migration is not None and migration.migration_id != except_id:
        raise DataDirUnusable(
            f"{data_dir} was migrated to Postgres, or is being migrated: go on there with "
            "`conveyor migrate-engine`. To give the migration up, delete "
            f"{data_dir / _MARK_FILE} and the tables in Postgres"
        )


def require_no_process(data_dir: Path) -> None:
    """Raises DataDirInUse if any process has the database open, an owner or one that helps it."""
    path = data_dir / _DATABASE
    if not path.exists():
        raise DataDirUnusable(f"{data_dir} has no database: nothing to migrate")
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        if not is_busy(error):
            raise unusable(path, error) from error
        raise DataDirInUse(
            f"{data_dir} is in use by another process: stop it first", pid=None
        ) from error


class SourceRows:
    """The rows of a directory that no process changes, page by page. Values are as they are stored,
    so a damaged row is copied like any other."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def of_kind(self, kind: RowKind, after: Sequence[Any] | None, limit: int) -> list[Values]:
        """Returns the next rows of a kind after the row with this key."""
        columns = ", ".join(f'"{name}"' for name in kind.row_type.__struct_fields__)
        keys = ", ".join(kind.key_fields)
        where, values = "", list(after or ())
        if after is not None:
            where = f"WHERE ({keys}) > ({', '.join('?' * len(values))})"
        return self._read(
            f"SELECT {columns} FROM {kind.table} {where} ORDER BY {keys} LIMIT ?", *values, limit
        )

    def open_queues(self, after: str, limit: int) -> list[Values]:
        sql = "SELECT run_id FROM queues WHERE run_id > ? ORDER BY run_id LIMIT ?"
        return self._read(sql, after, limit)

    def messages(self, after: int, steady: float, limit: int) -> list[Values]:
        """Returns the id of each message, its run, its reference, the seconds from now to its
        visibility, and its receives."""
        sql = """
            SELECT message_id, run_id, job_id, task_id, shard, visible_at - ?, receives
            FROM messages CROSS JOIN queues USING (queue_id)
            WHERE message_id > ? AND run_id IS NOT NULL ORDER BY message_id LIMIT ?
        """
        return self._read(sql, steady, after, limit)

    def run_keys(self, after: Sequence[str] | None, limit: int) -> list[Values]:
        sql = """
            SELECT job_id, run_id FROM runs WHERE (job_id, run_id) > (?, ?)
            ORDER BY job_id, run_id LIMIT ?
        """
        return self._read(sql, *(after or ("", "")), limit)

    def _read(self, sql: str, *values: Any) -> list[Values]:
        return self._connection.execute(sql, values).fetchall()


@contextmanager
def open_rows(data_dir: Path) -> Iterator[SourceRows]:
    uri = f"{(data_dir / _DATABASE).absolute().as_uri()}?mode=ro"
    # Used by one thread after the other.
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
    # Texts of third parties may contain what is not UTF-8.
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    with closing(connection):
        yield SourceRows(connection)


def list_body_files(data_dir: Path) -> list[str]:
    """Returns the files of bodies, relative to the folder of bodies and in order: packs, and bodies
    that are whole files."""
    root = data_dir / "blobs"
    return sorted(
        str(Path(directory, file).relative_to(root))
        for directory, _, files in os.walk(root)
        for file in files
    )


def key_of_file(name: str) -> str:
    """Returns the key under which a bucket has the content of this file."""
    directory, _, last = name.rpartition(",")
    return f"{directory}{last}" if directory.endswith(f"/{MARK}") else f"{directory}/{last}"


async def read_body_file(data_dir: Path, name: str, executor: DiskExecutor) -> AsyncIterator[bytes]:
    with (data_dir / "blobs" / name).open("rb") as file:
        while piece := await executor.run(file.read, _PIECE_BYTES):
            yield piece


def link_body_files(data_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Puts files of bodies into another folder of bodies: as links on the same file system, else as
    copies. Files never change, except that a pack grows while its process runs."""
    directories = set()
    for name in names:
        target = folder / "blobs" / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directories |= {folder / "blobs" / parent for parent in Path(name).parents}
        if not target.exists():
            _link_or_copy(data_dir / "blobs" / name, target, folder / "temp")
    for directory in directories:
        sync_directory(str(directory))


def _link_or_copy(source: Path, target: Path, temp_dir: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        # A copy appears whole: after a kill there is the whole file or none.
        draft = temp_dir / f"migration-{os.getpid()}"
        shutil.copyfile(source, draft)
        draft.chmod(0o600)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
