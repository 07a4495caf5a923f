"""PostgresQueue: one table of messages for all runs, in the database of the rows (SPEC.md 4.4).

A message is visible from `visible_at` on, and `visible_at` is also its position in the queue. Its
receipt is its id and its count of receives, so the next receive invalidates the previous receipt.

Receives, acks and bounces are committed without waiting for the disk. If the server crashes, the
last of them may be lost: messages return, and the claims of their tasks absorb that, as they absorb
every other duplicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.model import TaskRef
from conveyor.engines.postgres.connection import Statement
from conveyor.engines.postgres.database import Database
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Message

# Returns the instant of this call on the clock of the queue, or None for the clock of the server.
Instant = Callable[[], float | None]

NOT_DURABLE = Statement("SELECT set_config('synchronous_commit', 'off', true)")

# Messages removed per transaction.
_SLICE_ROWS = 5_000

# Looks first: a conflict would use up an id each time.
OPEN = """
INSERT INTO queues (run_id) SELECT run_id FROM unnest($1::text[]) AS run_id
WHERE run_id NOT IN (SELECT run_id FROM queues WHERE run_id = ANY($1)) ON CONFLICT DO NOTHING
"""
# The queue is found in the same statement, so a queue that was closed meanwhile takes no message.
# The subquery is evaluated once: an instant of each message would cost a fifth of the statement.
SEND = """
INSERT INTO messages (queue_id, job_id, task_id, shard, visible_at, receives)
SELECT queue_id, job_id, task_id, shard, (SELECT instant($5)), 0
FROM queues, unnest($2::text[], $3::text[], $4::bigint[]) AS refs (job_id, task_id, shard)
WHERE run_id = $1
"""
EXIST = "SELECT run_id FROM queues WHERE run_id = ANY($1) FOR KEY SHARE"
RECEIVE = """
WITH found AS (
    SELECT queue_id, instant($4) AS at FROM queues WHERE run_id = $1
), oldest AS (
    SELECT message_id, visible_at FROM messages
    WHERE queue_id = (SELECT queue_id FROM found) AND visible_at <= (SELECT at FROM found)
    ORDER BY visible_at, message_id LIMIT $2 FOR UPDATE SKIP LOCKED
), taken AS (
    UPDATE messages SET visible_at = (SELECT at FROM found) + $3, receives = receives + 1
    WHERE message_id = ANY(ARRAY(SELECT message_id FROM oldest))
    RETURNING message_id, receives, job_id, task_id, shard
)
SELECT taken.* FROM found LEFT JOIN (taken JOIN oldest USING (message_id)) ON true
ORDER BY oldest.visible_at, message_id
"""
HIDE = """
UPDATE messages SET visible_at = instant($4) + $3
FROM unnest($1::bigint[], $2::bigint[]) AS given (id, count)
WHERE message_id = id AND receives = count RETURNING message_id, receives
"""
ACK = """
DELETE FROM messages USING unnest($1::bigint[], $2::bigint[]) AS given (id, count)
WHERE message_id = id AND receives = count
"""
CLOSE = "UPDATE queues SET run_id = NULL WHERE run_id = $1 RETURNING queue_id"
CLOSED = "SELECT queue_id FROM queues WHERE run_id IS NULL ORDER BY queue_id LIMIT 100"
CLEAR = """
DELETE FROM messages WHERE message_id = ANY(ARRAY(
    SELECT message_id FROM messages WHERE queue_id = $1 ORDER BY visible_at, message_id LIMIT $2
    FOR UPDATE SKIP LOCKED
))
"""
REMOVE = """
DELETE FROM queues WHERE queue_id = $1 AND run_id IS NULL
AND NOT EXISTS (SELECT FROM messages WHERE queue_id = $1)
"""
DEPTH = """
SELECT count(*) FILTER (WHERE visible_at <= instant($2)), count(*) FROM messages
WHERE queue_id = (SELECT queue_id FROM queues WHERE run_id = $1)
"""


class PostgresQueue:
    def __init__(self, database: Database, instant: Instant) -> None:
        self._database = database
        self._instant = instant

    async def open_run(self, run_id: RunId) -> None:
        await self._database.write(open_queues([run_id]))

    async def close_run(self, run_id: RunId) -> None:
        """Closes the queue in one step and clears it in several.

        A caller that was interrupted leaves a closed queue with messages. So each call also clears
        one slice of other closed queues, and no more, so that closing a short queue does not wait
        for a long one.
        """
        closed = await self._database.write(Statement(CLOSE, (run_id,)))
        own = [queue_id for (queue_id,) in closed.rows]
        left = await self._database.read(Statement(CLOSED))
        for (queue_id,) in left.rows:
            if queue_id not in own:
                await self._clear(queue_id)
        for queue_id in own:
            while await self._clear(queue_id):
                pass

    async def _clear(self, queue_id: int) -> bool:
        """Removes a slice of a closed queue, or the queue after the last one. Returns whether there
        may be more."""
        answer = await self._database.write(Statement(CLEAR, (queue_id, _SLICE_ROWS)))
        if answer.rows_count == _SLICE_ROWS:
            return True
        await self._database.write(Statement(REMOVE, (queue_id,)))
        return False

    async def send(self, refs: Sequence[TaskRef]) -> None:
        if not refs:
            return
        run_ids = list(dict.fromkeys(ref.run_id for ref in refs))
        sends = send(refs, self._instant())
        answers = await self._database.run(Statement(EXIST, (run_ids,)), *sends)
        there = {run_id for (run_id,) in answers[0].rows}
        for run_id in run_ids:
            if run_id not in there:
                raise QueueGone(run_id)

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        params = (run_id, count_max, visibility_s, self._instant())
        _, answer = await self._database.run(NOT_DURABLE, Statement(RECEIVE, params))
        if not answer.rows:
            raise QueueGone(run_id)
        return [_message(run_id, *row) for row in answer.rows if row[0] is not None]

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        return await self._hide(messages, for_s=visibility_s)

    async def ack(self, messages: Sequence[Message]) -> None:
        await self._database.run(NOT_DURABLE, Statement(ACK, _receipts(messages)))

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        await self._hide(messages, for_s=delay_s)

    async def _hide(self, messages: Sequence[Message], *, for_s: float) -> frozenset[str]:
        """Hides messages for `for_s`. Returns the receipts that are no longer valid."""
        params = (*_receipts(messages), for_s, self._instant())
        _, answer = await self._database.run(NOT_DURABLE, Statement(HIDE, params))
        valid = {f"{number}.{receives}" for number, receives in answer.rows}
        return frozenset(message.receipt for message in messages) - valid

    async def depth(self, run_id: RunId) -> Depth:
        answer = await self._database.read(Statement(DEPTH, (run_id, self._instant())))
        ((visible, total),) = answer.rows
        return Depth(visible=visible, hidden=total - visible)


def open_queues(run_ids: Sequence[RunId]) -> Statement:
    return Statement(OPEN, (run_ids,))


def send(refs: Sequence[TaskRef], now: float | None) -> list[Statement]:
    """Returns what sends references to the queues of their runs, where these exist."""
    by_run: dict[RunId, list[TaskRef]] = {}
    for ref in refs:
        by_run.setdefault(ref.run_id, []).append(ref)
    return [
        Statement(
            SEND,
            (
                run_id,
                [ref.job_id for ref in own],
                [ref.task_id for ref in own],
                [ref.shard for ref in own],
                now,
            ),
        )
        for run_id, own in by_run.items()
    ]


def _receipts(messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    parts = [message.receipt.partition(".") for message in messages]
    return [int(number) for number, _, _ in parts], [int(receives) for _, _, receives in parts]


def _message(
    run_id: RunId, number: int, receives: int, job_id: JobId, task_id: TaskId, shard: int
) -> Message:
    ref = TaskRef(job_id=job_id, run_id=run_id, task_id=task_id, shard=shard)
    return Message(f"{number}.{receives}", ref, receives)
