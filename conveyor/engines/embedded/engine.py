"""The embedded engine: every durable port on one data directory (SPEC 5.6)."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import trio

from conveyor.engines.embedded.blobs import FileBlobs
from conveyor.engines.embedded.coordinator import SqliteCoordinator
from conveyor.engines.embedded.database import open_database
from conveyor.engines.embedded.errors import WrongSchema
from conveyor.engines.embedded.hands import Hands, Threads
from conveyor.engines.embedded.migrations import check_current, migrate
from conveyor.engines.embedded.owner import owning
from conveyor.engines.embedded.packs import sync_directory
from conveyor.engines.embedded.queue import SqliteQueue
from conveyor.engines.embedded.recovery import recover
from conveyor.engines.embedded.store import SqliteStore
from conveyor.ports.clock import Clock

_DATABASE = "conveyor.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedEngine:
    """One data directory's worth of state: its parts belong together."""

    store: SqliteStore
    queue: SqliteQueue
    blobs: FileBlobs
    coordinator: SqliteCoordinator


@asynccontextmanager
async def open_engine(
    data_dir: Path, *, clock: Clock, random: Random, owner: str, hands: Hands | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """Owns the directory: makes or migrates it, and frees what dead processes held.

    `owner` is the role to tell others about. DataDirInUse when another process owns it.
    """

    def prepare(connection: sqlite3.Connection) -> None:
        migrate(connection)
        recover(connection, clock.now())

    with owning(data_dir, role=owner, now=clock.now()):
        hands = hands or Threads()
        await hands.do(_make_places, data_dir)
        async with _serving(data_dir, prepare, clock, random, hands) as engine:
            yield engine


@asynccontextmanager
async def join_engine(
    data_dir: Path, *, clock: Clock, random: Random, hands: Hands | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """Works on a directory that another process owns; WrongSchema when it is not ready."""
    if not (data_dir / _DATABASE).exists():
        raise WrongSchema(f"{data_dir} has no database yet: start its owner first")
    async with _serving(data_dir, check_current, clock, random, hands or Threads()) as engine:
        yield engine


@asynccontextmanager
async def _serving(
    data_dir: Path,
    prepare: Callable[[sqlite3.Connection], None],
    clock: Clock,
    random: Random,
    hands: Hands,
) -> AsyncIterator[EmbeddedEngine]:
    async with open_database(data_dir / _DATABASE, prepare, hands) as database:
        blobs = FileBlobs(data_dir / "blobs", data_dir / "temp", random, hands)
        try:
            yield EmbeddedEngine(
                store=SqliteStore(database, clock),
                queue=SqliteQueue(database, clock),
                blobs=blobs,
                coordinator=SqliteCoordinator(database, clock, random),
            )
        finally:
            with trio.CancelScope(shield=True):
                await blobs.wait_until_at_rest()


def _make_places(data_dir: Path) -> None:
    """Makes the places for bodies, and removes bodies that were never finished."""
    for name in ("blobs", "temp"):
        (data_dir / name).mkdir(mode=0o700, exist_ok=True)
    for entry in os.scandir(data_dir / "temp"):
        os.unlink(entry)
    for directory in (data_dir, data_dir.absolute().parent):
        sync_directory(str(directory))
