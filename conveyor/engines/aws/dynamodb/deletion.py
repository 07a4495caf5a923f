"""Deletion: removes the rows of deleted jobs and runs, and expired rows
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from conveyor.domain.changes import (
    KIND_OF_ROW,
    KINDS_OF_RUN,
    Applied,
    Change,
    Delete,
    EventKey,
    Guard,
    JobKey,
    RunKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Event, IdempotencyRecord, Run
from conveyor.engines.aws.dynamodb import keys
from conveyor.engines.aws.dynamodb.items import Item, codec_of, pointer_item
from conveyor.engines.aws.dynamodb.keys import BY_OWNER, Place
from conveyor.engines.aws.dynamodb.queries import (
    Range,
    decode,
    due,
    merge_ranges,
    prefix_range,
    take,
    target_of,
)
from conveyor.engines.aws.dynamodb.table import Table, place_in
from conveyor.engines.aws.dynamodb.transactions import apply
from conveyor.engines.aws.gather import gather
from conveyor.ports.errors import RowDamaged

_PAGE = 500  # Items that one query reads ahead.
_PURGED_AT_ONCE = 25
# Where the rows of a kind are found: in the partitions of the shards, or by an index. Rows of
# other kinds are in the partition of the job, and notices have a pointer there.
_IN_SHARDS = (TaskKey, StatsKey)
_BY_INDEX = (EventKey,)


async def delete_run_rows(table: Table, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
    """Removes up to `limit` rows. Pointers are removed with their rows and are not counted."""
    # Tasks and counters are in one partition per shard, so their number must be known first.
    shard_count = await _shard_count(table, job_id)
    shards = [keys.shard(job_id, number) for number in range(shard_count)]
    gone = 0
    for kind in KINDS_OF_RUN:
        if kind.key_type in _IN_SHARDS:
            ranges = [prefix_range(shard, f"{kind.name}#{run_id or ''}") for shard in shards]
            gone += await _delete_from_shards(table, ranges, limit - gone)
    doomed: list[list[Place]] = []
    async with aclosing(rows_to_delete(table, job_id, run_id)) as rows:
        while gone + len(doomed) < limit and (places := await anext(rows, None)) is not None:
            doomed.append(places)
    # The last place of each row is the one by which the others are found. It is removed last: if
    # the deletion is interrupted, the next one still finds the rest.
    await table.remove([place for places in doomed for place in places[:-1]])
    await table.remove([places[-1] for places in doomed])
    return gone + len(doomed)


async def _delete_from_shards(table: Table, ranges: list[Range], limit: int) -> int:
    """Removes rows of all shards evenly, so that all partitions work at the same time."""
    if limit <= 0:
        return 0
    async with aclosing(merge_ranges(table, ranges, limit=limit)) as items:
        places = [place_in(item) for item in await take(limit, items)]
    await table.remove_from_shards(places)
    return len(places)


async def _shard_count(table: Table, job_id: JobId) -> int:
    """Returns the largest shard count of the job and its runs. The row of a deleted job remains."""
    job = await table.get(JobKey(job_id))
    counts = [1] if job is None else [job.shard_count]
    runs = prefix_range(keys.job(job_id), "Run#")
    async with aclosing(merge_ranges(table, [runs], limit=_PAGE)) as items:
        job_items = [item async for item in items]
    counts += [run.shard_count for run in decode(table, Run, job_items)]
    return max(counts)


async def rows_to_delete(
    table: Table, job_id: JobId, run_id: RunId | None
) -> AsyncGenerator[list[Place], None]:
    """Yields the items of each row: the row, its pointers, and last the item that was found."""
    partition = keys.job(job_id)
    for kind in KINDS_OF_RUN:
        if kind.key_type in _IN_SHARDS:
            continue
        prefix = f"{kind.name}#{run_id or ''}"
        if kind.key_type in _BY_INDEX:
            by_index = prefix_range(partition, prefix, BY_OWNER)
            async with aclosing(rows_named_by(table, by_index)) as places:
                async for place in places:
                    yield [place]
            continue
        in_job = prefix_range(partition, prefix)
        async with aclosing(merge_ranges(table, [in_job], limit=_PAGE)) as items:
            async for item in items:
                pointers = _pointers(item) if kind.key_type is RunKey else []
                yield list(dict.fromkeys([*pointers, target_of(item), place_in(item)]))


async def rows_named_by(table: Table, key_range: Range) -> AsyncGenerator[Place, None]:
    """Yields the places that an index names and that exist in the table.

    An index may still name removed rows for a minute. A deletion that repeats until nothing is left
    would not end without this check.
    """
    async with aclosing(merge_ranges(table, [key_range], limit=_PAGE)) as items:
        while named := await take(_PURGED_AT_ONCE, items):
            for place in await table.get_items([place_in(item) for item in named]):
                yield place


def _pointers(item: Item) -> list[Place]:
    """Returns the pointer of a run.

    Rows of other kinds are found through their pointers. The pointer of a run whose row cannot be
    decoded stays; a query that finds it dangling removes it.
    """
    try:
        run = codec_of(Run).from_item(item)
    except RowDamaged:
        return []
    pointer = pointer_item(RunKey(run.job_id, run.run_id), {"sequence": run.sequence})
    assert pointer is not None
    return [place_in(pointer)]


async def delete_expired(table: Table, now: float) -> int:
    """Removes expired rows now. DynamoDB's own expiry removes them too, but only within days."""
    records = await _purge(table, due("Key", before=now), now, IdempotencyRecord)
    # The index orders events by `occurred_at`. All events have the same lifetime, so that is also
    # the order in which they expire.
    return records + await _purge(table, due("Event", ["new", "placed"], before=now), now, Event)


async def _purge(
    table: Table, ranges: list[Range], now: float, row_type: type[IdempotencyRecord | Event]
) -> int:
    gone = 0
    async with aclosing(merge_ranges(table, ranges, limit=_PURGED_AT_ONCE)) as items:
        while named := await take(_PURGED_AT_ONCE, items):
            targets = await table.get_items([place_in(item) for item in named])
            rows = decode(table, row_type, targets.values())
            expired = [_removal(row, now) for row in rows if row.expires_at < now]
            # The rows come in order: after a page without an expired row there is none.
            if not expired:
                break
            verdicts = await gather(partial(apply, table), expired)
            gone += sum(isinstance(verdict, Applied) for verdict in verdicts)
    return gone


def _removal(row: IdempotencyRecord | Event, now: float) -> Change:
    key = KIND_OF_ROW[type(row)].key_of(row)
    return Change((Delete(key, Guard(lapsed=("expires_at", now))),))
