"""A model of a power cut: only synced data of a directory survives (docs/storage.md, Blob keys).

The file system is the real one, and calls of `fsync` and `fdatasync` are observed. After a power
cut a file has the content of its last sync, a directory has the names of its last sync, and
nothing else is left. A real kernel may write names earlier than requested, so a file must be
synced before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """The content of the directory `root` after a power cut. `torn` lists files that were given a
    name before their content was synced."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self.torn: list[str] = []
        patch.setattr(os, "fsync", self._after(os.fsync))
        patch.setattr(os, "fdatasync", self._after(os.fdatasync))
        patch.setattr(os, "rename", self._naming(os.rename))
        patch.setattr(os, "link", self._naming(os.link))

    def sync_all(self) -> None:
        """Treats everything that exists now as synced."""
        for folder, _, files in os.walk(self._root):
            self._keep_names(folder)
            for name in files:
                path = Path(folder, name)
                self._contents[path.stat().st_ino] = path.read_bytes()

    def cut_power(self, to: Path) -> None:
        """Writes the surviving content to another directory."""
        self._restore(self._root.stat().st_ino, to)

    def _restore(self, folder: int, to: Path) -> None:
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, (inode, is_folder) in self._names.get(folder, {}).items():
            if is_folder:
                self._restore(inode, to / name)
            else:
                (to / name).write_bytes(self._contents.get(inode, b""))

    def _after(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def watched(descriptor: int) -> None:
            sync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.isdir(path):
                self._keep_names(path)
            else:
                self._contents[os.fstat(descriptor).st_ino] = Path(path).read_bytes()

        return watched

    def _naming(self, give: Callable[..., None]) -> Callable[..., None]:
        def watched(source: Any, target: Any, **options: Any) -> None:
            content = Path(source).read_bytes()
            is_empty = Path(target).name == "reserve"  # A file with space and without content.
            if not is_empty and self._contents.get(os.stat(source).st_ino) != content:
                self.torn.append(str(target))
            give(source, target, **options)

        return watched

    def _keep_names(self, folder: str) -> None:
        entries = [entry for entry in os.scandir(folder) if not entry.name.endswith(".sock")]
        self._names[os.stat(folder).st_ino] = {
            entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries
        }
