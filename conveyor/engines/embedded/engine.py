"""The embedded engine: every durable port on one data directory
(docs/engines.md, Embedded engine)."""

from __future__ import annotations

import logging
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
from conveyor.engines.embedded.errors import WrongSchema, is_full, unusable
from conveyor.engines.embedded.hands import Hands, Threads
from conveyor.engines.embedded.health import Health
from conveyor.engines.embedded.migrations import check_current, migrate
from conveyor.engines.embedded.owner import owning
from conveyor.engines.embedded.private import make_private_directory, take_files_from_others
from conveyor.engines.embedded.queue import SqliteQueue
from conveyor.engines.embedded.recovery import recover
from conveyor.engines.embedded.space import Space
from conveyor.engines.embedded.store import SqliteStore
from conveyor.engines.embedded.vacuum import rewrite_once
from conveyor.engines.files import sync_directory
from conveyor.ports.clock import Clock

log = logging.getLogger(__name__)

_DATABASE = "conveyor.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedEngine:
    """One data directory's worth of state: its parts belong together."""

    store: SqliteStore
    queue: SqliteQueue
    blobs: FileBlobs
    coordinator: SqliteCoordinator
    health: Health


@asynccontextmanager
async def open_engine(
    data_dir: Path, *, clock: Clock, random: Random, owner: str, hands: Hands | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """Owns the directory: makes or migrates it, and frees what dead processes held.

    `owner` is the role to tell others about. DataDirInUse when another process owns it.
    """

    def prepare(connection: sqlite3.Connection) -> None:
        migrate(connection)
        rewrite_once(connection, space)
        _recover_if_there_is_room(connection, clock)

    hands = hands or Threads()
    space = Space(data_dir, hands)
    with owning(data_dir, role=owner, now=clock.now()):
        await hands.do(_make_places, data_dir, space)
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
    space = Space(data_dir, hands)
    async with open_database(data_dir / _DATABASE, prepare, hands, space) as database:
        blobs = FileBlobs(data_dir, random, hands, space)
        try:
            yield EmbeddedEngine(
                store=SqliteStore(database, clock, space),
                queue=SqliteQueue(database, clock),
                blobs=blobs,
                coordinator=SqliteCoordinator(database, clock, random),
                health=database.health,
            )
        finally:
            with trio.CancelScope(shield=True):
                await blobs.wait_until_at_rest()


def _recover_if_there_is_room(connection: sqlite3.Connection, clock: Clock) -> None:
    """Without room the directory is served all the same, to be read and to be deleted from: what
    dead processes held lapses by itself."""
    try:
        recover(connection, now=clock.now(), steady=clock.steady())
    except sqlite3.Error as error:
        if not is_full(error):
            raise
        if connection.in_transaction:
            connection.rollback()
        log.warning("the disk is full: claims of ended processes lapse by themselves")


def _make_places(data_dir: Path, space: Space) -> None:
    """Makes the places for bodies, all of them private, and removes bodies that were never
    finished."""
    try:
        take_files_from_others(data_dir)
        for name in ("blobs", "temp"):
            make_private_directory(data_dir / name)
        for entry in os.scandir(data_dir / "temp"):
            os.unlink(entry)
        space.prepare()
        for directory in (data_dir, data_dir.absolute().parent):
            sync_directory(str(directory))
    except OSError as error:
        raise unusable(data_dir, error) from error
