"""SqliteQueue: one table of messages for all runs, in the same database as the rows (SPEC.md 4.4).

A message is visible from `visible_at` on, and `visible_at` is also its position in the queue. All
instants here are of the steady clock, which all processes of a machine share: setting the wall
clock neither hides nor shows a message. A receipt is the id of the message and its count of
receives, so the next receive invalidates the previous receipt.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial

from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.model import TaskRef
from conveyor.engines.sqlite.database import Database
from conveyor.ports.clock import Clock
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Message

# Messages removed per transaction: about 3 ms of the Trio thread, during which no other task runs.
_SLICE_ROWS = 1000

_OLDEST = """
SELECT message_id, receives + 1, job_id, task_id, shard FROM messages
WHERE queue_id = ? AND visible_at <= ? ORDER BY visible_at, message_id LIMIT ?
"""
_TAKE = "UPDATE messages SET visible_at = ?, in_hand = 1, receives = ? WHERE message_id = ?"
# `receives` is compared in the next two: a receipt of an earlier delivery changes nothing.
_HIDE = "UPDATE messages SET visible_at = ?, in_hand = ? WHERE message_id = ? AND receives = ?"
_ACK = "DELETE FROM messages WHERE message_id = ? AND receives = ?"
_PUT = """
INSERT INTO messages (queue_id, job_id, task_id, shard, visible_at, in_hand, receives)
VALUES (?, ?, ?, ?, ?, 0, 0)
"""
# A subquery, because DELETE with LIMIT is an optional feature of SQLite builds.
_SWEEP = """
DELETE FROM messages
WHERE message_id IN (SELECT message_id FROM messages WHERE queue_id = ? LIMIT ?)
"""
_DEPTH = """
SELECT count(*) FILTER (WHERE visible_at <= ?), count(*) FROM messages
WHERE queue_id = (SELECT queue_id FROM queues WHERE run_id = ?)
"""


# A received message: its id, its count of receives, and its task reference without the run.
_Taken = tuple[int, int, JobId, TaskId, int]


class SqliteQueue:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def open_run(self, run_id: RunId) -> None:
        await self._database.write(lambda connection: open_queue(connection, run_id))

    async def close_run(self, run_id: RunId) -> None:
        """Closes the queue in one step and clears it in several.

        A caller that was interrupted leaves a closed queue with messages. So each call also clears
        one slice of every other closed queue (seed 3203). It clears no more than a slice, so that
        closing a short queue does not wait for a long one.
        """

        def detach(connection: sqlite3.Connection) -> tuple[int | None, list[int]]:
            closed = connection.execute("SELECT queue_id FROM queues WHERE run_id IS NULL")
            left = [queue_id for (queue_id,) in closed]
            own = _queue_id(connection, run_id)
            connection.execute("UPDATE queues SET run_id = NULL WHERE queue_id = ?", (own,))
            return own, left

        own, left = await self._database.write(detach)
        for queue_id in left:
            await self._database.write(partial(sweep, queue_id=queue_id))
        while own is not None and await self._database.write(partial(sweep, queue_id=own)):
            pass

    async def send(self, refs: Sequence[TaskRef]) -> None:
        now = self._clock.steady()

        def op(connection: sqlite3.Connection) -> RunId | None:
            for run_id in dict.fromkeys(ref.run_id for ref in refs):
                if _queue_id(connection, run_id) is None:
                    return run_id
            enqueue(connection, refs, now)
            return None

        gone = await self._database.write(op)
        if gone is not None:
            raise QueueGone(gone)

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        now = self._clock.steady()

        def op(connection: sqlite3.Connection) -> list[_Taken] | None:
            queue_id = _queue_id(connection, run_id)
            if queue_id is None:
                return None
            taken = connection.execute(_OLDEST, (queue_id, now, count_max)).fetchall()
            hidden = [(now + visibility_s, receives, number) for number, receives, *_ in taken]
            connection.executemany(_TAKE, hidden)
            return taken

        # An early write: the hiding need not be durable. If it is lost, the message is delivered
        # twice, and the claim of the task rejects the second delivery.
        taken = await self._database.write_early(op)
        if taken is None:
            raise QueueGone(run_id)
        return [_message(run_id, row) for row in taken]

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        receipts = [message.receipt for message in messages]
        return await self._hide(receipts, for_s=visibility_s, received=1)

    async def ack(self, messages: Sequence[Message]) -> None:
        delivered = [_parse(message.receipt) for message in messages]

        def op(connection: sqlite3.Connection) -> None:
            connection.executemany(_ACK, delivered)

        await self._database.write_batched(op)

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        await self._hide([message.receipt for message in messages], for_s=delay_s, received=0)

    async def depth(self, run_id: RunId) -> Depth:
        now = self._clock.steady()

        def op(connection: sqlite3.Connection) -> Depth:
            visible, total = connection.execute(_DEPTH, (now, run_id)).fetchone()
            return Depth(visible=visible, hidden=total - visible)

        # A receive returns before its commit, and readers see only commits. The empty write waits
        # for that commit, so that received messages count as hidden.
        await self._database.write(lambda _: None)
        return await self._database.read(op)

    async def _hide(self, receipts: list[str], *, for_s: float, received: int) -> frozenset[str]:
        """Hides messages for `for_s`. Returns the receipts that are no longer valid."""
        visible_at = self._clock.steady() + for_s
        delivered = [(receipt, *_parse(receipt)) for receipt in receipts]

        def op(connection: sqlite3.Connection) -> frozenset[str]:
            return frozenset(
                receipt
                for receipt, number, receives in delivered
                if not connection.execute(_HIDE, (visible_at, received, number, receives)).rowcount
            )

        return await self._database.write(op)


def enqueue(connection: sqlite3.Connection, refs: Sequence[TaskRef], now: float) -> None:
    """Sends references. Creates a missing queue, because an effect must not fail."""
    numbers = {
        run_id: open_queue(connection, run_id)
        for run_id in dict.fromkeys(ref.run_id for ref in refs)
    }
    rows = [(numbers[ref.run_id], ref.job_id, ref.task_id, ref.shard, now) for ref in refs]
    connection.executemany(_PUT, rows)


def sweep(connection: sqlite3.Connection, queue_id: int) -> bool:
    """Removes a slice of a closed queue, or the queue after the last one.

    Returns whether there may be more.
    """
    if connection.execute(_SWEEP, (queue_id, _SLICE_ROWS)).rowcount == _SLICE_ROWS:
        return True
    connection.execute("DELETE FROM queues WHERE queue_id = ?", (queue_id,))
    return False


def open_queue(connection: sqlite3.Connection, run_id: RunId) -> int:
    queue_id = _queue_id(connection, run_id)
    if queue_id is not None:
        return queue_id
    cursor = connection.execute("INSERT INTO queues (run_id) VALUES (?)", (run_id,))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _queue_id(connection: sqlite3.Connection, run_id: RunId) -> int | None:
    row = connection.execute("SELECT queue_id FROM queues WHERE run_id = ?", (run_id,)).fetchone()
    return None if row is None else int(row[0])


def _message(run_id: RunId, taken: _Taken) -> Message:
    number, receives, job_id, task_id, shard = taken
    ref = TaskRef(job_id=job_id, run_id=run_id, task_id=task_id, shard=shard)
    return Message(f"{number}.{receives}", ref, receives)


def _parse(receipt: str) -> tuple[int, int]:
    number, _, receives = receipt.partition(".")
    return int(number), int(receives)
