"""Privacy of a data directory: its owner alone can read what lies there, whatever was there before.

URLs, metadata and bodies are callers' data. Everything is made with a private mode from the start;
what an earlier release or another program left open is closed at the next start.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (nothing is put there)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_directory(directory: Path) -> None:
    """Makes the directory where it is missing, and takes it from everybody but its owner."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    take_from_others(directory)


def take_from_others(path: Path) -> None:
    """Leaves group and others no right to the file or directory.

    One that belongs to another user stays as it is, with a warning: what is made inside is private
    all the same. So does a directory that all users share, such as /tmp; that of a volume, which
    often has the mode of one, is not shared while nobody else has anything there.
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
            "others may enter the data directory: it belongs to another user",
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
    """The files directly in the directory: what is deeper lies in private directories."""
    for entry in _entries(directory):
        if entry.is_file(follow_symlinks=False):
            take_from_others(Path(entry.path))
