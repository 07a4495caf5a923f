"""Chunks: one ingest step, safe to be cut off anywhere and to be done by two at once
(docs/engines.md, DynamoDB store).

Rows, then counts, then refs, then the checkpoint. The counts move in a transaction that also notes
on the batch, in `counted`, how far they go: a step that is done again, be it by one that takes
longer or shorter steps, finds what is counted. They come before the refs, so that nothing can be
settled that was not admitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from conveyor.domain.changes import (
    Change,
    Chunk,
    Guard,
    Insert,
    Missing,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
)
from conveyor.domain.model import Task, TaskRef
from conveyor.domain.submit.admission import counts_of
from conveyor.engines.aws.client.retry import backoff_s
from conveyor.engines.aws.dynamodb import expressions, transactions
from conveyor.engines.aws.dynamodb.adaptive_writes import put_rows
from conveyor.engines.aws.dynamodb.expressions import Expression, Params
from conveyor.engines.aws.dynamodb.item_codec import to_attribute
from conveyor.engines.aws.dynamodb.keys import item_key
from conveyor.engines.aws.dynamodb.table import ROUNDS_MAX, Table
from conveyor.ports.errors import Unavailable

COUNTED = "counted"

Send = Callable[[tuple[TaskRef, ...]], Awaitable[None]]


async def put_chunk(table: Table, chunk: Chunk, send: Send) -> Verdict:
    # Nobody who is fenced out already writes a row.
    refusal, counted = await _look(table, chunk)
    if refusal is not None:
        return refusal
    await put_rows(table.concurrency, chunk.tasks, partial(_put_task, table, chunk), table.random)
    if not _is_counted(chunk, counted):
        refusal = await _count(table, chunk, counted)
        if refusal is not None:
            return refusal
    if chunk.refs:
        await send(chunk.refs)
    checkpoint = Update(chunk.key, _fence(chunk), values=chunk.values)
    return await transactions.apply(table, Change((checkpoint,)))


async def _put_task(table: Table, chunk: Chunk, task: Task) -> None:
    """Inserts, or leaves what is there as it is; which is why a lost answer does not matter."""
    key = TaskKey(chunk.key.job_id, task.run_id, task.task_id, task.shard)
    await table.write("PutItem", expressions.put(table.name, Insert(key, task)), attempts_max=1)


async def _count(table: Table, chunk: Chunk, counted: int | None) -> Stale | Missing | None:
    for number in range(ROUNDS_MAX):
        if await table.write_together(_counter_items(table.name, chunk, counted)) is None:
            return None
        refusal, counted = await _look(table, chunk)
        if refusal is not None or _is_counted(chunk, counted):
            return refusal
        await trio.sleep(backoff_s(number, table.random))
    raise Unavailable("the counters of a step do not stand still")


async def _look(table: Table, chunk: Chunk) -> tuple[Stale | Missing | None, int | None]:
    """What is wrong with the step, and how far the counts of its list go, if any were made."""
    counts = [Update(_stats_key(chunk, shard), _gate(chunk)) for shard in chunk.stats]
    writes = [Update(chunk.key, _fence(chunk)), *counts]
    places = {write.key: item_key(write.key) for write in writes}
    items = await table.get_items(list(places.values()))
    rows: dict[Any, Any] = {
        key: expressions.codec_for(key).from_item(items[place])
        for key, place in places.items()
        if place in items
    }
    note = items.get(places[chunk.key], {}).get(COUNTED)
    counted = None if note is None else int(note["N"])
    return transactions.guard_holds(
        writes[:1] if _is_counted(chunk, counted) else writes, rows
    ), counted


def _is_counted(chunk: Chunk, counted: int | None) -> bool:
    """A step without tasks has nothing to count, but notes where it is."""
    return counted is not None and counted >= _reached(chunk)


def _counter_items(table: str, chunk: Chunk, counted: int | None) -> list[dict[str, Params]]:
    stats = _left_to_count(chunk, counted)
    counts = [
        Update(_stats_key(chunk, shard), _gate(chunk), deltas=deltas)
        for shard, deltas in sorted(stats.items())
    ]
    steps = [step for count in counts for step in transactions.transaction_items(table, count)]
    return [{"Update": _note_counted(table, chunk, counted)}, *steps]


def _left_to_count(chunk: Chunk, counted: int | None) -> dict[int, dict[str, int]]:
    """A step of another length may have begun where this one does, and have been cut off after its
    counts: its lines are the first of these."""
    ahead = 0 if counted is None else counted - chunk.done_before
    return chunk.stats if ahead <= 0 else counts_of(chunk.tasks[ahead:])


def _note_counted(table: str, chunk: Chunk, counted: int | None) -> Params:
    expression = Expression(chunk.key)
    there = expression.value(to_attribute(_reached(chunk)))
    unmoved = f"attribute_not_exists({COUNTED})"
    if counted is not None:
        unmoved = f"{COUNTED} = {expression.value(to_attribute(counted))}"
    return expression.params(
        table,
        UpdateExpression=f"SET {COUNTED} = {there}",
        ConditionExpression=f"{expression.present(_fence(chunk))} AND {unmoved}",
    )


def _stats_key(chunk: Chunk, shard: int) -> StatsKey:
    return StatsKey(chunk.key.job_id, chunk.key.run_id, shard)


def _gate(chunk: Chunk) -> Guard:
    return Guard(status_in=chunk.gate_in)


def _fence(chunk: Chunk) -> Guard:
    return Guard(equals=(("epoch", chunk.epoch), ("done", chunk.done_before)))


def _reached(chunk: Chunk) -> int:
    """Where the counts stand once the step's are made: a step without tasks gets nowhere."""
    return chunk.done_before + len(chunk.tasks)
