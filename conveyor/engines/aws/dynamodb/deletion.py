"""Scrubs: the rows of what was deleted, and of what has expired, go for good
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from conveyor.domain.changes import (
    Applied,
    Change,
    Delete,
    EventKey,
    Guard,
    JobKey,
    RecordKey,
    RunKey,
)
from conveyor.domain.event import Event
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import IdempotencyRecord, Run
from conveyor.engines.aws.dynamodb import keys
from conveyor.engines.aws.dynamodb.expressions import pointer_item
from conveyor.engines.aws.dynamodb.gather import gather
from conveyor.engines.aws.dynamodb.item_codec import Item, codec_of
from conveyor.engines.aws.dynamodb.keys import BY_OWNER, Index, Place
from conveyor.engines.aws.dynamodb.queries import (
    BASE,
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
from conveyor.ports.errors import RowDamaged

_PAGE = 500
_PURGED_AT_ONCE = 25
# In this order: the rows of runs, which tell how many shards there are, go last.
_IN_SHARDS = ("Task", "Stats")
_IN_JOB = ("Batch", "Notice", "Export", "Budget", "Share")


async def delete_run_rows(table: Table, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
    """Pointers go with their rows and are not counted."""
    shard_count = await _shard_count(table, job_id)
    shards = [keys.shard(job_id, number) for number in range(shard_count)]
    gone = 0
    for kind in _IN_SHARDS:
        ranges = [prefix_range(shard, f"{kind}#{run_id or ''}") for shard in shards]
        gone += await _scrub_shards(table, ranges, limit - gone)
    doomed: list[list[Place]] = []
    async with aclosing(rows_to_delete(table, job_id, run_id)) as rows:
        while gone + len(doomed) < limit and (places := await anext(rows, None)) is not None:
            doomed.append(places)
    # What the others are found by goes last, or who is cut off leaves something for good.
    await table.remove([place for places in doomed for place in places[:-1]])
    await table.remove([places[-1] for places in doomed])
    return gone + len(doomed)


async def _scrub_shards(table: Table, ranges: list[Range], limit: int) -> int:
    """As many rows of one shard as of the other, so that all are at work."""
    if limit <= 0:
        return 0
    async with aclosing(merge_ranges(table, ranges, limit=limit)) as items:
        places = [place_in(item) for item in await take(limit, items)]
    await table.remove_from_shards(places)
    return len(places)


async def _shard_count(table: Table, job_id: JobId) -> int:
    """As the job has it, or any of its runs: the row of a deleted job stays."""
    job = await table.get(JobKey(job_id))
    counts = [1] if job is None else [job.shard_count]
    runs = prefix_range(keys.job(job_id), "Run#")
    async with aclosing(merge_ranges(table, [runs], limit=_PAGE)) as items:
        found = [item async for item in items]
    counts += [run.shard_count for run in decode(table, Run, found)]
    return max(counts)


async def rows_to_delete(
    table: Table, job_id: JobId, run_id: RunId | None
) -> AsyncGenerator[list[Place], None]:
    """The items of one row after the other: it, what points at it, and last where it was found."""
    job = keys.job(job_id)

    def of(kind: str, index: Index = BASE) -> Range:
        return prefix_range(job, f"{kind}#{run_id or ''}", index)

    for kind in _IN_JOB:
        async with aclosing(merge_ranges(table, [of(kind)], limit=_PAGE)) as items:
            async for item in items:
                yield list(dict.fromkeys([target_of(item), place_in(item)]))
    async with aclosing(rows_named_by(table, of("Event", BY_OWNER))) as places:
        async for place in places:
            yield [place]
    async with aclosing(merge_ranges(table, [of("Run")], limit=_PAGE)) as items:
        async for item in items:
            yield [*_pointers(item), place_in(item)]


async def rows_named_by(table: Table, asked: Range) -> AsyncGenerator[Place, None]:
    """What an index shows and the table has: one that is behind shows for a minute what is gone,
    and who scrubs until nothing is left would not rest."""
    async with aclosing(merge_ranges(table, [asked], limit=_PAGE)) as items:
        while named := await take(_PURGED_AT_ONCE, items):
            for place in await table.get_items([place_in(item) for item in named]):
                yield place


def _pointers(item: Item) -> list[Place]:
    """A run's; others are come by through their pointers, or swept by who finds them dangling,
    as is that of a run whose row cannot be decoded."""
    try:
        run = codec_of(Run).from_item(item)
    except RowDamaged:
        return []
    pointer = pointer_item(RunKey(run.job_id, run.run_id), {"sequence": run.sequence})
    assert pointer is not None
    return [place_in(pointer)]


async def delete_expired(table: Table, now: float) -> int:
    """The table drops what has expired by itself, within days; this is for whoever counts."""
    records = await _purge(table, due("Key", before=now), now, IdempotencyRecord)
    # All events live equally long, so that the oldest expire first.
    return records + await _purge(table, due("Event", ["new", "placed"], before=now), now, Event)


async def _purge(
    table: Table, ranges: list[Range], now: float, row_type: type[IdempotencyRecord | Event]
) -> int:
    gone = 0
    async with aclosing(merge_ranges(table, ranges, limit=_PURGED_AT_ONCE)) as items:
        while named := await take(_PURGED_AT_ONCE, items):
            found = await table.get_items([place_in(item) for item in named])
            rows = decode(table, row_type, found.values())
            expired = [_removal(row, now) for row in rows if row.expires_at < now]
            if not expired:
                break
            verdicts = await gather(partial(apply, table), expired)
            gone += sum(isinstance(verdict, Applied) for verdict in verdicts)
    return gone


def _removal(row: IdempotencyRecord | Event, now: float) -> Change:
    key = (
        RecordKey(row.key_id)
        if isinstance(row, IdempotencyRecord)
        else EventKey(row.caller, row.event_id)
    )
    return Change((Delete(key, Guard(lapsed=("expires_at", now))),))
