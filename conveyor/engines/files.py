"""Makes the name of a file durable, for all engines on a file system
(docs/engines.md, Embedded engine)."""

from __future__ import annotations

import os


def sync_directory(directory: str) -> None:
    """Syncs a directory. A sync of the file alone does not make its name durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
