"""One ingest step. It may be interrupted anywhere, and two workers may run it at the same time
(docs/engines.md, DynamoDB store).

The order is: rows, counts, references, checkpoint.

- Rows first: an insert of a row that exists changes nothing, so repeating it is safe.
- The transaction of the counts also sets `counted` on the batch row, the position up to which the
  list is counted. A repeated step reads `counted` and counts nothing twice, even if it is longer or
  shorter than the first.
- Counts before references: otherwise a task could be settled that was not yet admitted.
- The checkpoint last: everything before it is repeated if the step is interrupted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from conveyor.domain.changes import (
    Change,
    Chunk,
    Missing,
    Stale,
    TaskKey,
    Verdict,
    find_refusal,
)
from conveyor.domain.model import Task, TaskRef
from conveyor.domain.submit.admission import counts_of
from conveyor.engines.aws.client.client import backoff_s
from conveyor.engines.aws.dynamodb import transactions
from conveyor.engines.aws.dynamodb.items import (
    Expression,
    Params,
    codec_for,
    to_attribute,
    to_item,
)
from conveyor.engines.aws.dynamodb.keys import item_key
from conveyor.engines.aws.dynamodb.table import ROUNDS_MAX, Table, put_rows
from conveyor.ports.errors import Unavailable

COUNTED = "counted"

Send = Callable[[tuple[TaskRef, ...]], Awaitable[None]]


async def put_chunk(table: Table, chunk: Chunk, send: Send) -> Verdict:
    # Check the fence before the first row: a worker that lost the batch must not add rows.
    refusal, counted = await _check_step(table, chunk)
    if refusal is not None:
        return refusal
    await put_rows(
        table.concurrency, chunk.tasks, partial(_insert_tasks, table, chunk), table.random
    )
    if not _is_counted(chunk, counted):
        refusal = await _count(table, chunk, counted)
        if refusal is not None:
            return refusal
    if chunk.refs:
        await send(chunk.refs)
    return await transactions.apply(table, Change((chunk.checkpoint,)))


async def _insert_tasks(table: Table, chunk: Chunk, tasks: Sequence[Task]) -> list[Task]:
    """Inserts tasks, and keeps rows that exist. So a lost answer does no harm. Returns the tasks
    that were throttled."""
    job_id = chunk.key.job_id
    keys = [TaskKey(job_id, task.run_id, task.task_id, task.shard) for task in tasks]
    items = [to_item(key, task) for key, task in zip(keys, tasks, strict=True)]
    return [tasks[number] for number in await table.insert(items)]


async def _count(table: Table, chunk: Chunk, counted: int | None) -> Stale | Missing | None:
    for number in range(ROUNDS_MAX):
        if await table.write_together(_counter_items(table.name, chunk, counted)) is None:
            return None
        refusal, counted = await _check_step(table, chunk)
        if refusal is not None or _is_counted(chunk, counted):
            return refusal
        await trio.sleep(backoff_s(number, table.random))
    raise Unavailable("the counters of a step do not stand still")


async def _check_step(table: Table, chunk: Chunk) -> tuple[Stale | Missing | None, int | None]:
    """Returns why the step is refused, if it is, and the position up to which it is counted."""
    writes = [chunk.checkpoint, *chunk.count_updates()]
    places = {write.key: item_key(write.key) for write in writes}
    items = await table.get_items(list(places.values()))
    rows: dict[Any, Any] = {
        key: codec_for(key).from_item(items[place])
        for key, place in places.items()
        if place in items
    }
    note = items.get(places[chunk.key], {}).get(COUNTED)
    counted = None if note is None else int(note["N"])
    # Only the fence can refuse a step that is counted.
    return find_refusal(writes[:1] if _is_counted(chunk, counted) else writes, rows), counted


def _is_counted(chunk: Chunk, counted: int | None) -> bool:
    """A step without tasks adds no counts, but still sets `counted`."""
    return counted is not None and counted >= _counted_after(chunk)


def _counter_items(table: str, chunk: Chunk, counted: int | None) -> list[dict[str, Params]]:
    counts = chunk.count_updates(_left_to_count(chunk, counted))
    steps = [step for count in counts for step in transactions.transaction_items(table, count)]
    return [{"Update": _note_counted(table, chunk, counted)}, *steps]


def _left_to_count(chunk: Chunk, counted: int | None) -> dict[int, dict[str, int]]:
    """Returns the counts that are still to be added.

    A step of another length may have started at the same position and have been interrupted after
    its counts. Its tasks are the first tasks of this step.
    """
    ahead = 0 if counted is None else counted - chunk.done_before
    return chunk.stats if ahead <= 0 else counts_of(chunk.tasks[ahead:])


def _note_counted(table: str, chunk: Chunk, counted: int | None) -> Params:
    expression = Expression(chunk.key)
    there = expression.value(to_attribute(_counted_after(chunk)))
    # The condition compares `counted` with the value that was read: of two workers that run the
    # same step only one adds the counts.
    unmoved = f"attribute_not_exists({COUNTED})"
    if counted is not None:
        unmoved = f"{COUNTED} = {expression.value(to_attribute(counted))}"
    return expression.params(
        table,
        UpdateExpression=f"SET {COUNTED} = {there}",
        ConditionExpression=f"{expression.present(chunk.fence)} AND {unmoved}",
    )


def _counted_after(chunk: Chunk) -> int:
    """Returns the value of `counted` after this step."""
    return chunk.done_before + len(chunk.tasks)
