"""FileBlobs on a folder that processes share, of one machine or of several
(docs/engines.md, Postgres engine)."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import trio

from conveyor.domain.errors import ConveyorError
from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.sqlite.blobs import FileBlobs
from conveyor.engines.sqlite.disk_space import Space
from conveyor.engines.sqlite.engine import make_private_directory
from conveyor.ports.clock import Clock

# Files of uploads that never ended. No process writes one file for so long without a pause.
_LEFT_OVER_S = 24 * 3600.0
_PLACES = ("blobs", "temp")


class FolderUnusable(ConveyorError):
    """The folder does not exist, is not the one that was made for bodies, or cannot be made."""


@asynccontextmanager
async def open_shared_blobs(
    folder: Path, *, clock: Clock, random: Random, owner: str, makes: bool
) -> AsyncGenerator[FileBlobs, None]:
    """Opens the folder. `owner` is the id of this process, which no other process has.

    Only a process that may make the folder makes it. Another one would hide that a disk is not
    mounted, and write bodies where no other machine reads them.
    """
    executor = ThreadExecutor()
    if not makes and not is_shared_folder(folder):
        raise FolderUnusable(
            f"there is no folder of bodies at {folder} (CONVEYOR_BLOB_DIR): mount its disk, or "
            "make it with `conveyor init`"
        )
    await make_shared_folder(folder, now=clock.now())
    blobs = FileBlobs(folder, random, executor, Space(folder, executor), owner=f"{owner}-")
    try:
        yield blobs
    finally:
        # Shielded: the threads still write files, which no other process would finish.
        with trio.CancelScope(shield=True):
            await blobs.wait_until_at_rest()


def is_shared_folder(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in _PLACES)


async def make_shared_folder(folder: Path, *, now: float) -> None:
    try:
        await ThreadExecutor().run(_make_places, folder, now)
    except OSError as error:
        raise FolderUnusable(
            f"the folder of bodies {folder} (CONVEYOR_BLOB_DIR) cannot be used: {error.strerror}"
        ) from error


def _make_places(folder: Path, now: float) -> None:
    """Makes the private directories for bodies, and removes bodies that were never finished."""
    for name in _PLACES:
        make_private_directory(folder / name)
    # Other processes may be writing: only an old file has no writer any more.
    for entry in os.scandir(folder / "temp"):
        with suppress(FileNotFoundError):
            if entry.stat().st_mtime < now - _LEFT_OVER_S:
                os.unlink(entry)
