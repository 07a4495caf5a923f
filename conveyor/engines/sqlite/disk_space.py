"""Free space on the volume of a data directory: a floor for new work, and a reserve for deletes
(docs/engines.md, Room and damage).

A caller can free a full disk through the API only if a DELETE still commits. So the engine refuses
new work (bodies, lists, jobs, runs, tasks, exports) while some space is left. Other programs may
still fill the volume. For that case the engine keeps a reserve, a file of a fixed size, and removes
it when SQLite reports a full disk. It restores the reserve when there is space again.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from sqlite3 import Connection

from conveyor.engines.executor import DiskExecutor, Volume
from conveyor.engines.sqlite.errors import raise_translated_os
from conveyor.ports.errors import StorageFull

log = logging.getLogger(__name__)

RESERVE_FILE = "reserve"
# The commits of a delete and of its deletion claims take some hundred KiB of the write-ahead log.
# The bodies are removed next, and free the space for the rest.
RESERVE_BYTES_MAX = 8 * 1024 * 1024
# The bodies of the pages in flight and the write-ahead log, usually 16 MiB, fit below the floor. A
# larger floor leaves more of the volume unused; a smaller one fails pages that were paid for.
FLOOR_BYTES_MAX = 256 * 1024 * 1024
# The floor of a small volume is an eighth of it, and the reserve half of that.
_FLOOR_SHARE = 8
_BLOCK_BYTES = 512  # The unit of `st_blocks`, on every file system.
# With less free space SQLite may fail to open: it needs space for its shared memory and its log.
_OPENING_BYTES = 1024 * 1024


class Space:
    """The free space on the volumes of one data directory.

    Callers use `check_new` before they begin new work, such as a job. They use `check_body` when a
    body arrives. That body is already paid for, so it may use half of the space below the floor.
    """

    def __init__(self, data_dir: Path, executor: DiskExecutor) -> None:
        self._data_dir = str(data_dir)
        self._blobs_dir = str(data_dir / "blobs")
        self._reserve = str(data_dir / RESERVE_FILE)
        self._executor = executor

    def check_new(self) -> None:
        """Raises StorageFull if no new work should be accepted."""
        self._check(self._data_dir, self._measure(self._data_dir), 0, floor_share=1)
        self.check_fetch()

    def check_fetch(self) -> None:
        """Raises StorageFull if no further page should be fetched."""
        self._check(self._blobs_dir, self._measure(self._blobs_dir), 0, floor_share=1)

    def check_body(self, size_bytes: int) -> None:
        """Raises StorageFull if a body of so many bytes should not be written."""
        self._check(self._blobs_dir, self._measure(self._blobs_dir), size_bytes, floor_share=2)

    def has_room(self, size_bytes: int) -> bool:
        """Returns whether the volume stays above the floor with so many more bytes."""
        volume = self._measure(self._data_dir)
        return volume.free_bytes - size_bytes >= _floor(volume)

    def prepare(self) -> None:
        """Restores the reserve, or releases it if the database could not be opened otherwise."""
        if self._measure(self._data_dir).free_bytes < _OPENING_BYTES:
            self.release()
        else:
            self.restore()

    def release(self) -> bool:
        """Removes the reserve. Returns whether there was one."""
        try:
            os.unlink(self._reserve)
        except FileNotFoundError:
            return False
        log.warning("the disk is full: the reserve was released", extra={"path": self._data_dir})
        return True

    def restore(self) -> bool:
        """Creates the reserve if it is missing and there is space. Returns whether it exists."""
        volume = self._measure(self._data_dir)
        size_bytes = min(RESERVE_BYTES_MAX, volume.total_bytes // (2 * _FLOOR_SHARE))
        if not size_bytes or self._reserved_bytes() >= size_bytes:
            return True
        if volume.free_bytes < _floor(volume) + size_bytes:
            return False
        return self._allocate(size_bytes)

    def _reserved_bytes(self) -> int:
        """Returns the allocated size: a power cut may have left a file without blocks."""
        try:
            return os.stat(self._reserve).st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def _allocate(self, size_bytes: int) -> bool:
        draft = f"{self._reserve}.new"
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Not ftruncate: a sparse file would occupy no space and free none.
                os.posix_fallocate(descriptor, 0, size_bytes)
            finally:
                os.close(descriptor)
            # Renamed when it is complete, so that the name `reserve` never means a partial file.
            os.rename(draft, self._reserve)
        except OSError as error:
            log.warning("disk reserve not created", extra={"path": draft, "cause": str(error)})
            with suppress(OSError):
                os.unlink(draft)
            return False
        return True

    def _measure(self, directory: str) -> Volume:
        try:
            return self._executor.measure_volume(directory)
        except OSError as error:
            raise_translated_os(error)

    def _check(self, directory: str, volume: Volume, size_bytes: int, *, floor_share: int) -> None:
        floor_bytes = _floor(volume) // floor_share
        if volume.free_bytes - size_bytes < floor_bytes:
            raise StorageFull(
                f"{directory} has {volume.free_bytes >> 20} MiB free: "
                f"{floor_bytes >> 20} MiB are kept for what is there"
            )


def _floor(volume: Volume) -> int:
    return min(FLOOR_BYTES_MAX, volume.total_bytes // _FLOOR_SHARE)


# Vacuum: returns the space of deleted rows to the file system (docs/storage.md, SQLite files).
#
# A file of this release is vacuumed in small steps, each in a transaction of its own (SQLite's
# incremental vacuum). A file of an earlier release does not support this. It is rewritten once, at
# a start, if enough of it is free to justify the time and the disk has space for a second copy.


# Pages per step: about 5 ms, during which no other write runs.
STEP_PAGES = 256
# Free pages that are kept for the next rows. Without them a file in use would shrink and grow all
# the time.
SLACK_PAGES = 256

_INCREMENTAL = 2  # SQLite's number of this `auto_vacuum` mode.
# A rewrite takes about a second for 200 MB, and the process serves no requests meanwhile.
_REWRITE_BYTES_MAX = 2 * 1024 * 1024 * 1024
# At least a quarter of the file must be free.
_WORTHWHILE_SHARE = 4


def free_pages(connection: Connection) -> int:
    """Returns how many pages the incremental vacuum could return."""
    if _read(connection, "auto_vacuum") != _INCREMENTAL:
        return 0
    return max(0, _read(connection, "freelist_count") - SLACK_PAGES)


def shrink_step(connection: Connection) -> None:
    # The pragma frees one page per step of the statement, and has no result columns. `execute`
    # would step only once.
    connection.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES})")


def rewrite_once(connection: Connection, space: Space) -> None:
    """Converts a file of an earlier release to incremental vacuum, if that is worth the time."""
    if _read(connection, "auto_vacuum") == _INCREMENTAL:
        return
    pages, page_bytes = _read(connection, "page_count"), _read(connection, "page_size")
    size_bytes = pages * page_bytes
    is_worthwhile = _read(connection, "freelist_count") * _WORTHWHILE_SHARE >= pages
    # VACUUM writes the copy to a temporary file, then to the log, then into the database. So it
    # needs twice the size of the file.
    if is_worthwhile and size_bytes <= _REWRITE_BYTES_MAX and space.has_room(2 * size_bytes):
        log.warning("the database is rewritten to free space", extra={"bytes": size_bytes})
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")


def _read(connection: Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
