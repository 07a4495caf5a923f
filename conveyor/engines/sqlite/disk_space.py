"""Room on the volume of a data directory: a floor for new work, and a reserve for deleting
(docs/engines.md, Room and damage).

A full disk can be helped through the API only if a DELETE still commits. So new work (bodies,
lists, jobs, runs, tasks, exports) is refused while some room is left, and a file of a fixed size is
kept that is removed when SQLite meets the end of the volume all the same: other programs may fill
the volume too. The reserve is made again when there is room.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from sqlite3 import Connection

from conveyor.engines.sqlite.errors import raise_translated_os
from conveyor.engines.sqlite.executor import BlockingExecutor, Volume
from conveyor.ports.errors import StorageFull

log = logging.getLogger(__name__)

RESERVE_FILE = "reserve"
# The commits of a delete and of its scrub claims take some hundred KiB of the write-ahead log, and
# the bodies, which go next, give room for the rest.
RESERVE_BYTES_MAX = 8 * 1024 * 1024
# Bodies of the pages that are in flight, and the write-ahead log at its usual 16 MiB, fit below it.
FLOOR_BYTES_MAX = 256 * 1024 * 1024
# A small volume keeps this share free, and half of it as the reserve.
_FLOOR_SHARE = 8
_BLOCK_BYTES = 512  # The unit of `st_blocks`, whatever the file system has.
# Below this an opening database may not find room for its shared memory and its log.
_OPENING_BYTES = 1024 * 1024


class Space:
    """What is left on the volumes of one data directory.

    `check_new` is asked before something is begun, a page or a job; `check_body` when a body that
    was already paid for arrives, which therefore may use half of the room below the floor.
    """

    def __init__(self, data_dir: Path, executor: BlockingExecutor) -> None:
        self._data_dir = str(data_dir)
        self._blobs_dir = str(data_dir / "blobs")
        self._reserve = str(data_dir / RESERVE_FILE)
        self._executor = executor

    def check_new(self) -> None:
        """StorageFull when no new work should be taken."""
        self._check(self._data_dir, self._measure(self._data_dir), 0, floor_share=1)
        self.check_fetch()

    def check_fetch(self) -> None:
        """StorageFull when no further page should be fetched."""
        self._check(self._blobs_dir, self._measure(self._blobs_dir), 0, floor_share=1)

    def check_body(self, size_bytes: int) -> None:
        """StorageFull when a body of so many bytes should not be written."""
        self._check(self._blobs_dir, self._measure(self._blobs_dir), size_bytes, floor_share=2)

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes more leave the data directory above the floor."""
        volume = self._measure(self._data_dir)
        return volume.free_bytes - size_bytes >= _floor(volume)

    def prepare(self) -> None:
        """Before the database is opened: makes the reserve, or spends it if there is no room."""
        if self._measure(self._data_dir).free_bytes < _OPENING_BYTES:
            self.release()
        else:
            self.restore()

    def release(self) -> bool:
        """Gives the reserve up; whether there was one."""
        try:
            os.unlink(self._reserve)
        except FileNotFoundError:
            return False
        log.warning("the disk is full: the reserve was released", extra={"path": self._data_dir})
        return True

    def restore(self) -> bool:
        """Makes the reserve where it is missing and there is room; whether it is there."""
        volume = self._measure(self._data_dir)
        size_bytes = min(RESERVE_BYTES_MAX, volume.total_bytes // (2 * _FLOOR_SHARE))
        if not size_bytes or self._reserved_bytes() >= size_bytes:
            return True
        if volume.free_bytes < _floor(volume) + size_bytes:
            return False
        return self._allocate(size_bytes)

    def _reserved_bytes(self) -> int:
        """What the reserve holds of the volume: a power cut may have left its name alone."""
        try:
            return os.stat(self._reserve).st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def _allocate(self, size_bytes: int) -> bool:
        draft = f"{self._reserve}.new"
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
            finally:
                os.close(descriptor)
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


# Vacuum: the database file gives room back that deleted rows left (docs/storage.md, SQLite files).
#
# A file of this release is shrunk in small steps, each a transaction like any other (SQLite's
# incremental vacuum). A file that an earlier release made cannot be, so it is rewritten once, at a
# start, where enough of it is free to be worth the time and the disk has room for a second copy.


# Moved in one step: about 5 ms during which nothing else is written.
STEP_PAGES = 256
# Left for the next rows: a file that is used is not shrunk and grown again all the time.
SLACK_PAGES = 256

_INCREMENTAL = 2
# A rewrite takes about a second for 200 MB, and its process serves nobody meanwhile.
_REWRITE_BYTES_MAX = 2 * 1024 * 1024 * 1024
_WORTHWHILE_SHARE = 4


def free_pages(connection: Connection) -> int:
    """How many pages the file could give back in steps."""
    if _read(connection, "auto_vacuum") != _INCREMENTAL:
        return 0
    return max(0, _read(connection, "freelist_count") - SLACK_PAGES)


def shrink_step(connection: Connection) -> None:
    # A page a row, of a statement without columns: `execute` would stop after the first.
    connection.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES})")


def rewrite_once(connection: Connection, space: Space) -> None:
    """Makes a file of an earlier release one that can be shrunk, if that is worth it now."""
    if _read(connection, "auto_vacuum") == _INCREMENTAL:
        return
    pages, page_bytes = _read(connection, "page_count"), _read(connection, "page_size")
    size_bytes = pages * page_bytes
    is_worthwhile = _read(connection, "freelist_count") * _WORTHWHILE_SHARE >= pages
    # The copy is written to a temporary file first, then to the log, then into the database.
    if is_worthwhile and size_bytes <= _REWRITE_BYTES_MAX and space.has_room(2 * size_bytes):
        log.warning("the database is rewritten to give room back", extra={"bytes": size_bytes})
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("VACUUM")


def _read(connection: Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
