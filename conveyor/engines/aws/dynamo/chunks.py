"""Chunks: one ingest step, safe to be cut off anywhere and to be done by two at once (SPEC 5.10).

Rows, then counts, then refs, then the checkpoint. The counts move in a transaction that also notes
on the batch, in `counted`, how far they go: a step that is done again finds its counts made. They
come before the refs, so that nothing can be settled that was not admitted.
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
from conveyor.engines.aws.dynamo import commits, expressions
from conveyor.engines.aws.dynamo.expressions import Expression, Params
from conveyor.engines.aws.dynamo.items import to_attribute
from conveyor.engines.aws.dynamo.lanes import fill_shards
from conveyor.engines.aws.dynamo.layout import place_of
from conveyor.engines.aws.dynamo.table import ROUNDS_MAX, Table
from conveyor.engines.aws.retrying import backoff_s
from conveyor.ports.errors import Unavailable

COUNTED = "counted"

Send = Callable[[tuple[TaskRef, ...]], Awaitable[None]]


async def put_chunk(table: Table, chunk: Chunk, send: Send) -> Verdict:
    # Nobody who is fenced out already writes a row.
    refusal, is_counted = await _look(table, chunk)
    if refusal is not None:
        return refusal
    await fill_shards(table.lanes, chunk.tasks, partial(_put_task, table, chunk), table.random)
    if not is_counted:
        refusal = await _count(table, chunk)
        if refusal is not None:
            return refusal
    if chunk.refs:
        await send(chunk.refs)
    checkpoint = Update(chunk.key, _fence(chunk), values=chunk.values)
    return await commits.apply(table, Change((checkpoint,)))


async def _put_task(table: Table, chunk: Chunk, task: Task) -> None:
    """Inserts, or leaves what is there as it is; which is why a lost answer does not matter."""
    key = TaskKey(chunk.key.job_id, task.run_id, task.task_id, task.shard)
    await table.write("PutItem", expressions.put(table.name, Insert(key, task)), attempts_max=1)


async def _count(table: Table, chunk: Chunk) -> Stale | Missing | None:
    for number in range(ROUNDS_MAX):
        if await table.write_together(_counting(table.name, chunk)) is None:
            return None
        refusal, is_counted = await _look(table, chunk)
        if refusal is not None or is_counted:
            return refusal
        await trio.sleep(backoff_s(number, table.random))
    raise Unavailable("the counters of a step do not stand still")


async def _look(table: Table, chunk: Chunk) -> tuple[Stale | Missing | None, bool]:
    """What is wrong with the step, and whether its counts are made."""
    writes = [Update(chunk.key, _fence(chunk)), *_counts(chunk)]
    places = {write.key: place_of(write.key) for write in writes}
    items = await table.get_items(list(places.values()))
    rows: dict[Any, Any] = {
        key: expressions.codec_for(key).from_item(items[place])
        for key, place in places.items()
        if place in items
    }
    batch = items.get(places[chunk.key], {})
    is_counted = batch.get(COUNTED) == to_attribute(_reached(chunk))
    return commits.judge(writes[:1] if is_counted else writes, rows), is_counted


def _counting(table: str, chunk: Chunk) -> list[dict[str, Params]]:
    steps = [step for count in _counts(chunk) for step in commits.steps_of(table, count)]
    return [{"Update": _noting(table, chunk)}, *steps]


def _noting(table: str, chunk: Chunk) -> Params:
    expression = Expression(chunk.key)
    there = expression.value(to_attribute(_reached(chunk)))
    elsewhere = f"(attribute_not_exists({COUNTED}) OR {COUNTED} <> {there})"
    return expression.params(
        table,
        UpdateExpression=f"SET {COUNTED} = {there}",
        ConditionExpression=f"{expression.present(_fence(chunk))} AND {elsewhere}",
    )


def _counts(chunk: Chunk) -> list[Update]:
    gate = Guard(status_in=chunk.gate_in)
    return [
        Update(StatsKey(chunk.key.job_id, chunk.key.run_id, shard), gate, deltas=deltas)
        for shard, deltas in sorted(chunk.stats.items())
    ]


def _fence(chunk: Chunk) -> Guard:
    return Guard(equals=(("epoch", chunk.epoch), ("done", chunk.done_before)))


def _reached(chunk: Chunk) -> int:
    """Where the counts stand once the step's are made: a step without tasks gets nowhere."""
    return chunk.done_before + len(chunk.tasks)
