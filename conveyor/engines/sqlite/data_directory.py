"""The owner lock: one process at a time answers for a data directory
(docs/engines.md, Ownership and recovery).

The lock is the kernel's and dies with its process; `owner.json` only tells who it is.
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
    """Holds the directory, made if need be; DataDirInUse when somebody else does."""
    lock = _open_lock(data_dir)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(data_dir) from error
        write_owner_file(data_dir, Owner(pid=os.getpid(), role=role, started_at=now))
        yield
    finally:
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
    """On a full disk there is no introduction, and none is better than that of somebody else."""
    draft = data_dir / "owner.json.new"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(owner))
        draft.replace(data_dir / "owner.json")
    except OSError:
        for path in (draft, data_dir / "owner.json"):
            path.unlink(missing_ok=True)


def _in_use(data_dir: Path) -> DataDirInUse:
    try:
        owner = msgspec.json.decode((data_dir / "owner.json").read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError):  # It has only just taken the lock.
        return DataDirInUse(f"{data_dir} is in use by another process", pid=None)
    who = f"{owner.role}, process {owner.pid}"
    return DataDirInUse(
        f"{data_dir} is in use by another Conveyor ({who}): "
        "stop it, or choose another directory with CONVEYOR_DATA_DIR",
        pid=owner.pid,
    )


# Privacy of a data directory: its owner alone can read what lies there, whatever was there before.
#
# URLs, metadata and bodies are callers' data. Everything is made with a private mode from the
# start; what an earlier release or another program left open is closed at the next start.


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
