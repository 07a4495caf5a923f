"""FileBlobs on a folder that processes share, of one machine or of several
(docs/engines.md, Postgres engine)."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import trio

from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.sqlite.blobs import FileBlobs
from conveyor.engines.sqlite.disk_space import Space
from conveyor.engines.sqlite.engine import make_private_directory
from conveyor.ports.clock import Clock

# Files of uploads that never ended. No process writes one file for so long without a pause.
_LEFT_OVER_S = 24 * 3600.0


@asynccontextmanager
async def open_shared_blobs(
    folder: Path, *, clock: Clock, random: Random, owner: str
) -> AsyncGenerator[FileBlobs, None]:
    """Opens the folder. `owner` is the id of this process, which no other process has."""
    executor = ThreadExecutor()
    await make_shared_folder(folder, now=clock.now())
    blobs = FileBlobs(folder, random, executor, Space(folder, executor), owner=f"{owner}-")
    try:
        yield blobs
    finally:
        # Shielded: the threads still write files, which no other process would finish.
        with trio.CancelScope(shield=True):
            await blobs.wait_until_at_rest()


async def make_shared_folder(folder: Path, *, now: float) -> None:
    await ThreadExecutor().run(_make_places, folder, now)


def _make_places(folder: Path, now: float) -> None:
    """Makes the private directories for bodies, and removes bodies that were never finished."""
    for name in ("blobs", "temp"):
        make_private_directory(folder / name)
    # Other processes may be writing: only an old file has no writer any more.
    for entry in os.scandir(folder / "temp"):
        with suppress(FileNotFoundError):
            if entry.stat().st_mtime < now - _LEFT_OVER_S:
                os.unlink(entry)
