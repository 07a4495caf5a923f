"""Power cuts: a directory of bodies as it is after the machine has restarted (docs/storage.md, Blob
keys; docs/simulator.md).

Bytes survive if their file was synced after they were written; a name survives if its directory was
synced after the name was made. Everything else is lost: that is the worst that a file system may
do. The database is not affected, because SQLite syncs by itself.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class SyncLog:
    """Records what the program has synced below `root`: the synced size of each file, and the names
    in each directory."""

    root: str
    _bytes_of: dict[int, int] = field(default_factory=dict)
    _names_in: dict[str, frozenset[str]] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records each sync of the work in this context instead of doing it: a sync of the real
        disk would only cost time."""
        system: Any = os
        before = os.fsync, os.fdatasync
        system.fsync = system.fdatasync = self._note
        try:
            yield
        finally:
            system.fsync, system.fdatasync = before

    def lose_unsynced(self) -> int:
        """Removes what a power cut would lose; returns the number of removed names and shortened
        files."""
        return self._lose_in(self.root)

    def _note(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self._names_in[os.path.realpath(path)] = frozenset(os.listdir(descriptor))
        else:
            self._bytes_of[status.st_ino] = status.st_size

    def _lose_in(self, directory: str) -> int:
        lost = 0
        synced = self._names_in.get(os.path.realpath(directory), frozenset())
        for name in sorted(os.listdir(directory)):
            path = Path(directory, name)
            if name not in synced:
                lost += 1
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                lost += self._lose_in(str(path))
            else:
                lost += self._lose_end(path)
        return lost

    def _lose_end(self, path: Path) -> int:
        status = path.stat()
        synced_bytes = self._bytes_of.get(status.st_ino, 0)
        if status.st_size <= synced_bytes:
            return 0
        os.truncate(path, synced_bytes)
        return 1
