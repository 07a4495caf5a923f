"""What engines on a file system share: making a name durable (docs/engines.md, Embedded engine)."""

from __future__ import annotations

import os


def sync_directory(directory: str) -> None:
    """A name is durable once its directory is synced; syncing the file is not enough."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
