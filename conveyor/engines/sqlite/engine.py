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

from conveyor.domain import limits
from conveyor.domain.run.settlement import RETRY_AFTER_S_MAX
from conveyor.engines.files import sync_directory
from conveyor.engines.sqlite.blobs import FileBlobs
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.engines.sqlite.data_directory import (
    lock_directory,
    make_private_directory,
    take_files_from_others,
)
from conveyor.engines.sqlite.database import Health, check_current, migrate, open_database
from conveyor.engines.sqlite.disk_space import Space, rewrite_once
from conveyor.engines.sqlite.errors import WrongSchema, is_full, unusable
from conveyor.engines.sqlite.executor import BlockingExecutor, ThreadExecutor
from conveyor.engines.sqlite.queue import SqliteQueue, sweep
from conveyor.engines.sqlite.store import SqliteStore
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
    data_dir: Path,
    *,
    clock: Clock,
    random: Random,
    owner: str,
    executor: BlockingExecutor | None = None,
) -> AsyncIterator[EmbeddedEngine]:
    """Owns the directory: makes or migrates it, and frees what dead processes held.

    `owner` is the role to tell others about. DataDirInUse when another process owns it.
    """

    def prepare(connection: sqlite3.Connection) -> None:
        migrate(connection)
        rewrite_once(connection, space)
        _recover_if_there_is_room(connection, clock)

    executor = executor or ThreadExecutor()
    space = Space(data_dir, executor)
    with lock_directory(data_dir, role=owner, now=clock.now()):
        await executor.run(_make_places, data_dir, space)
        async with _serving(data_dir, prepare, clock, random, executor) as engine:
            yield engine


@asynccontextmanager
async def join_engine(
    data_dir: Path, *, clock: Clock, random: Random, executor: BlockingExecutor | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """Works on a directory that another process owns; WrongSchema when it is not ready."""
    if not (data_dir / _DATABASE).exists():
        raise WrongSchema(f"{data_dir} has no database yet: start its owner first")
    async with _serving(
        data_dir, check_current, clock, random, executor or ThreadExecutor()
    ) as engine:
        yield engine


@asynccontextmanager
async def _serving(
    data_dir: Path,
    prepare: Callable[[sqlite3.Connection], None],
    clock: Clock,
    random: Random,
    executor: BlockingExecutor,
) -> AsyncIterator[EmbeddedEngine]:
    space = Space(data_dir, executor)
    async with open_database(data_dir / _DATABASE, prepare, executor, space) as database:
        blobs = FileBlobs(data_dir, random, executor, space)
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


# Recovery: what a new owner does with the hands of processes that are gone
# (docs/engines.md, Ownership and recovery).
#
# There is one owner at a time and it opens the data directory first, so whatever is in hand at that
# moment is in nobody's hand. It goes through the messages in hand, never through all tasks.


# Messages go by the steady clock, which starts anew with the machine: what was left by an earlier
# start may seem to lie far ahead. What was never received has nothing to wait for, and nothing is
# put back for longer than the longest delay of a retry.

# In hand and still hidden. One whose time is past has come back by itself, and so will its claim.
_LAPSE_CLAIMS = """
UPDATE tasks SET claim_until = 0 WHERE claim_until > 0 AND rowid IN (
    SELECT tasks.rowid
    FROM queues
    CROSS JOIN messages USING (queue_id)
    CROSS JOIN tasks USING (run_id, task_id)
    WHERE messages.visible_at > :steady AND messages.in_hand = 1
)
"""
_SHOW_MESSAGES = """
UPDATE messages SET visible_at = :steady, in_hand = 0 WHERE message_id IN (
    SELECT message_id
    FROM queues
    CROSS JOIN messages USING (queue_id)
    WHERE visible_at > :steady
    AND (in_hand = 1 OR receives = 0 OR visible_at > :steady + :delay_s_max)
)
"""
_LAPSE_KEYS = """
UPDATE key_records SET claimed_until = 0 WHERE response_status IS NULL AND claimed_until > 0
"""

# One that is over is due when it expires; any other is due after the claim of who makes it.
_LAPSE_EXPORTS = """
UPDATE exports SET due_at = :now WHERE due_at > :now AND due_at < expires_at
"""
# Taken by one who is gone, or due before long anyway.
_LAPSE_DELETIONS = """
UPDATE scrubs SET due_at = :now WHERE due_at > :now AND due_at <= :now + :claim_s
"""


def recover(connection: sqlite3.Connection, *, now: float, steady: float) -> None:
    """`now` is the wall clock's, `steady` what the other clock shows."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_LAPSE_CLAIMS, {"steady": steady})
    connection.execute(_SHOW_MESSAGES, {"steady": steady, "delay_s_max": RETRY_AFTER_S_MAX})
    connection.execute(_LAPSE_EXPORTS, {"now": now})
    connection.execute(_LAPSE_DELETIONS, {"now": now, "claim_s": limits.DELETION_CLAIM_S})
    connection.execute(_LAPSE_KEYS)
    connection.execute("DELETE FROM leases")
    connection.execute("DELETE FROM marks")
    closed = connection.execute("SELECT queue_id FROM queues WHERE run_id IS NULL").fetchall()
    connection.execute("COMMIT")
    for (queue_id,) in closed:
        while sweep(connection, queue_id):
            pass
