"""The owner lock: one process at a time answers for a data directory
(docs/engines.md, Ownership and recovery).

The lock is the kernel's and dies with its process; `owner.json` only tells who it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from conveyor.engines.embedded.errors import DataDirInUse, DataDirUnusable
from conveyor.engines.embedded.private import make_private_directory


class Owner(msgspec.Struct, frozen=True):
    pid: int
    role: str
    started_at: float


@contextmanager
def owning(data_dir: Path, *, role: str, now: float) -> Iterator[None]:
    """Holds the directory, made if need be; DataDirInUse when somebody else does."""
    lock = _open_lock(data_dir)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(data_dir) from error
        _introduce(data_dir, Owner(pid=os.getpid(), role=role, started_at=now))
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


def _introduce(data_dir: Path, owner: Owner) -> None:
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
