"""The owner lock: one process at a time owns a data directory
(docs/engines.md, Ownership and recovery).

The kernel holds the lock and releases it when the process ends, however it ends. `owner.json` is
only information about the owner for error messages.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from conveyor.engines.sqlite.errors import DataDirInUse, DataDirUnusable


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
    """Makes the files directly in the directory private. Its subdirectories are private already."""
    for entry in _entries(directory):
        if entry.is_file(follow_symlinks=False):
            take_from_others(Path(entry.path))
