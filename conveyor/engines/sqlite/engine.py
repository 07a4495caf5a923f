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
    """The ports of one data directory. They share one database and must be used together."""

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
    """Opens the directory as its owner: creates or migrates it, and recovers.

    `owner` is the role that other processes are shown. Raises DataDirInUse if another process owns
    the directory.
    """

    def prepare(connection: sqlite3.Connection) -> None:
        # The order matters: recovery uses the current schema.
        migrate(connection)
        rewrite_once(connection, space)
        _recover_if_there_is_room(connection, clock)

    executor = executor or ThreadExecutor()
    space = Space(data_dir, executor)
    # The lock comes before any other access: recovery frees the claims of all other processes.
    with lock_directory(data_dir, role=owner, now=clock.now()):
        await executor.run(_make_places, data_dir, space)
        async with _serving(data_dir, prepare, clock, random, executor) as engine:
            yield engine


@asynccontextmanager
async def join_engine(
    data_dir: Path, *, clock: Clock, random: Random, executor: BlockingExecutor | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """Opens a directory that another process owns. Raises WrongSchema if it is not ready."""
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
            # Shielded: the threads write into the directory, which the next owner may lock as soon
            # as this context ends.
            with trio.CancelScope(shield=True):
                await blobs.wait_until_at_rest()


def _recover_if_there_is_room(connection: sqlite3.Connection, clock: Clock) -> None:
    """Recovers, unless the disk is full.

    A full directory is served too, so that callers can read and delete. What ended processes held
    then lapses by itself.
    """
    try:
        recover(connection, now=clock.now(), steady=clock.steady())
    except sqlite3.Error as error:
        if not is_full(error):
            raise
        if connection.in_transaction:
            connection.rollback()
        log.warning("the disk is full: claims of ended processes lapse by themselves")


def _make_places(data_dir: Path, space: Space) -> None:
    """Makes the private directories for bodies, and removes bodies that were never finished."""
    try:
        take_files_from_others(data_dir)
        for name in ("blobs", "temp"):
            make_private_directory(data_dir / name)
        # This process has the owner lock and has started no put: all of these are left-overs.
        for entry in os.scandir(data_dir / "temp"):
            os.unlink(entry)
        space.prepare()
        for directory in (data_dir, data_dir.absolute().parent):
            sync_directory(str(directory))
    except OSError as error:
        raise unusable(data_dir, error) from error


# Recovery: a new owner frees the claims, messages and leases of processes that have ended
# (docs/engines.md, Ownership and recovery).
#
# There is one owner at a time, and it opens the data directory before other processes join. So a
# message that is in hand at that moment belongs to a process that has ended. Recovery reads the
# messages in hand, not all tasks: its cost does not grow with the number of tasks.


# Messages use the steady clock, which restarts with the machine. A `visible_at` from before a
# restart may therefore be far in the future. A message that was never received has no reason to
# wait, and no bounce hides a message for longer than the longest retry delay.

# Claims of messages that are in hand and still hidden. A message whose time is over is visible
# again without recovery, and its claim lapses without it too.
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

# A finished export is due when it expires. An unfinished one is due when its claim ends.
_LAPSE_EXPORTS = """
UPDATE exports SET due_at = :now WHERE due_at > :now AND due_at < expires_at
"""
# Deletions that an ended process had claimed, and deletions that are due within a claim's time.
_LAPSE_DELETIONS = """
UPDATE scrubs SET due_at = :now WHERE due_at > :now AND due_at <= :now + :claim_s
"""


def recover(connection: sqlite3.Connection, *, now: float, steady: float) -> None:
    """Frees what ended processes held. `now` is of the wall clock, `steady` of the steady clock."""
    # Claims first: `_SHOW_MESSAGES` clears `in_hand`, by which `_LAPSE_CLAIMS` finds its tasks.
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
    # Outside the transaction: a closed queue may be long, and each slice commits by itself.
    for (queue_id,) in closed:
        while sweep(connection, queue_id):
            pass
