"""Finds: each query as ranges to walk and rows to take from them (docs/storage.md, Queries;
docs/engines.md, DynamoDB store).

What lies in one partition is read there, consistently and in order. What an index or a pointer
names is read again by its key, and must still be what was asked for: an index may be late, so such
a find may miss what was just written, but it never shows what is not so.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, assert_never

import msgspec

from conveyor.domain.changes import RunKey
from conveyor.domain.events import Event
from conveyor.domain.export import Export
from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.inputs import JobInput
from conveyor.domain.model import Batch, Job, Notice, Run, Scrub, Stats, Task
from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    DueExpiries,
    DueExports,
    DueNotices,
    DueSchedules,
    DueScrubs,
    EventsOf,
    ExpiredInputs,
    JobsOf,
    NoticesOf,
    RunsIn,
    RunsOf,
    StatsOf,
    TaskPage,
    TasksOf,
    UnplacedEvents,
)
from conveyor.domain.schedules import Schedule
from conveyor.engines.aws.dynamo import layout
from conveyor.engines.aws.dynamo.items import Item, codec_of
from conveyor.engines.aws.dynamo.layout import BY_OWNER, BY_TIME, OF, Index, Place, stamp
from conveyor.engines.aws.dynamo.pages import LAST, Range, Reach, merged, starting_with
from conveyor.engines.aws.dynamo.table import Table, place_in
from conveyor.engines.aws.dynamo.together import slices

_FIRST = " "
_ALL = 1000

Passes = Callable[[Any], bool]
DueQuery = (
    BatchesIn
    | DueNotices
    | DueScrubs
    | UnplacedEvents
    | DueSchedules
    | DueExports
    | DueExpiries
    | ExpiredInputs
)


async def find(table: Table, query: AnyQuery) -> list[Any]:
    rows = await _find(table, query)
    table.meter.rows_returned += len(rows)
    return rows


async def _find(table: Table, query: AnyQuery) -> list[Any]:
    match query:
        case TasksOf():
            return await _tasks_of(table, query)
        case StatsOf():
            return await _stats_of(table, query)
        case JobsOf():
            return await _jobs_of(table, query)
        case RunsOf():
            return await _runs_of(table, query)
        case BatchesOf():
            return await _batches_of(table, query)
        case NoticesOf():
            return await _notices_of(table, query)
        case EventsOf():
            return await _events_of(table, query)
        case RunsIn():
            return await _runs_in(table, query)
        case _:
            ranges, row_type, passes = _asked(query)
            return await _shown(table, ranges, row_type, query.limit, passes)


def _asked(query: DueQuery) -> tuple[list[Range], type[msgspec.Struct], Passes]:
    """Where an index shows what is due, the type of its rows, and which of them are meant."""
    match query:
        case BatchesIn(statuses=statuses, idle_since=by):
            ranges = due("Batch", statuses, before=by)
            return ranges, Batch, lambda row: row.status in statuses and row.updated_at <= by
        case DueNotices(statuses=statuses, due_by=by):
            ranges = due("Notice", statuses, before=by)
            return ranges, Notice, lambda row: row.status in statuses and row.due_at <= by
        case DueScrubs(due_by=by):
            return due("Scrub", before=by), Scrub, lambda row: row.due_at <= by
        case UnplacedEvents(before=by):
            ranges = due("Event", ["new"], before=by)
            return ranges, Event, lambda row: row.seq == 0 and row.occurred_at < by
        case DueSchedules(statuses=statuses, due_by=by):
            after = _FIRST if query.after is None else f"{stamp(query.after[0])}#{query.after[1]}"
            ranges = due("Schedule", statuses, before=by, after=after)
            return ranges, Schedule, partial(_is_due, query)
        case DueExports(due_by=by):
            return due("Export", before=by), Export, lambda row: row.due_at <= by
        case DueExpiries(due_by=by):
            ranges = due("Expiry", before=by, index=BY_OWNER)
            return ranges, Run, lambda row: row.sweep_at is not None and row.sweep_at <= by
        case ExpiredInputs(expired_by=by):
            return due("Input", before=by), JobInput, lambda row: row.expires_at <= by
        case _:
            assert_never(query)


def _is_due(query: DueSchedules, row: Schedule) -> bool:
    if row.status not in query.statuses or row.next_fire_at is None:
        return False
    is_later = query.after is None or (row.next_fire_at, row.job_id) > query.after
    return is_later and row.next_fire_at <= query.due_by


async def _tasks_of(table: Table, query: TasksOf) -> list[Task]:
    async with aclosing(merged(table, _ranges_of(query), limit=query.limit)) as items:
        return decode(table, Task, await take(query.limit, items))


async def page_tasks(table: Table, query: TasksOf, *, read_max: int) -> TaskPage:
    """What is rare is not looked for to the end: the page says how far it went."""
    reach = Reach(read_max)
    async with aclosing(merged(table, _ranges_of(query), limit=query.limit, reach=reach)) as items:
        taken = await take(query.limit, items)
    tasks = decode(table, Task, taken)
    table.meter.rows_returned += len(tasks)
    until = place_in(taken[-1])[1] if len(taken) == query.limit else reach.until
    if until is None:
        return TaskPage(tasks, None)
    return TaskPage(tasks, TaskId(until.removeprefix(_tasks_prefix(query))))


def _tasks_prefix(query: TasksOf) -> str:
    return f"Task#{query.run_id}#"


def _ranges_of(query: TasksOf) -> list[Range]:
    """Of each shard what lies behind `after`: that one itself would be read in vain."""
    prefix = _tasks_prefix(query)
    first = prefix if query.after is None else f"{prefix}{query.after}{_FIRST}"
    statuses = None if query.statuses is None else frozenset(map(str, query.statuses))
    return [
        Range(
            partition=layout.shard(query.job_id, number),
            first=first,
            last=f"{prefix}{LAST}",
            statuses=statuses,
        )
        for number in range(query.shard_count)
    ]


async def _stats_of(table: Table, query: StatsOf) -> list[Stats]:
    places = [
        (layout.shard(query.job_id, number), f"Stats#{query.run_id}")
        for number in range(query.shard_count)
    ]
    found = await table.get_items(places)
    return [codec_of(Stats).from_item(found[place]) for place in places if place in found]


async def _batches_of(table: Table, query: BatchesOf) -> list[Batch]:
    batches = starting_with(layout.job(query.job_id), f"Batch#{query.run_id}#")
    async with aclosing(merged(table, [batches], limit=_ALL)) as items:
        rows = [codec_of(Batch).from_item(item) async for item in items]
    return sorted(rows, key=lambda row: (row.created_at, row.batch_id))


async def _jobs_of(table: Table, query: JobsOf) -> list[Job]:
    if query.external_id is None:
        partition, index = layout.caller(query.caller), BY_OWNER
    else:
        partition, index = layout.external(query.caller, query.external_id), BY_TIME
    jobs = Range(
        partition=partition,
        index=index,
        first=_FIRST,
        last=query.before or LAST,
        but=query.before,
        is_descending=True,
    )
    return await _shown(
        table,
        [jobs],
        Job,
        query.limit,
        lambda row: row.status in query.statuses and query.type in {None, row.type},
    )


async def _runs_of(table: Table, query: RunsOf) -> list[Run]:
    runs = _backwards(
        layout.job(query.job_id),
        "Sequence#",
        None if query.before is None else layout.sequence_pointer(query.before),
    )
    return await _shown(table, [runs], Run, query.limit, lambda row: row.status in query.statuses)


async def _notices_of(table: Table, query: NoticesOf) -> list[Notice]:
    notices = _backwards(
        layout.job(query.job_id),
        "Notice#" if query.run_id is None else f"Notice#{query.run_id}#",
        None if query.before is None else layout.notice_pointer(*query.before),
    )
    return await _shown(table, [notices], Notice, query.limit, lambda _: True)


def _backwards(partition: str, prefix: str, before: str | None) -> Range:
    return Range(
        partition=partition,
        first=prefix,
        last=before or f"{prefix}{LAST}",
        but=before,
        is_descending=True,
    )


async def _events_of(table: Table, query: EventsOf) -> list[Event]:
    events = Range(
        partition=layout.caller(query.caller),
        first=layout.seq_pointer(max(0, query.after) + 1),
        last=f"Seq#{LAST}",
    )
    return await _shown(table, [events], Event, query.limit, lambda _: True)


async def _runs_in(table: Table, query: RunsIn) -> list[Run]:
    """The index goes by the time of the change, so the names of all that changed are read; only
    the rows of one page are."""
    since = stamp(query.updated_since)
    ranges = [
        Range(partition=each, index=BY_TIME, first=since, last=LAST)
        for each in layout.buckets("Run", *map(str, query.statuses))
    ]
    async with aclosing(merged(table, ranges, limit=_ALL)) as items:
        # A row that moves on meanwhile is shown in its old place and in its new one.
        places = {place_in(item) async for item in items}
    after = layout.place_of(RunKey(JobId(""), query.after or RunId("")))[1]
    in_order = sorted((place for place in places if place[1] > after), key=lambda at: at[1])
    rows: list[Run] = []
    for some in slices(in_order, query.limit):
        found = await table.get_items(some)
        read = decode(table, Run, [found[place] for place in some if place in found])
        rows += [
            run
            for run in read
            if run.status in query.statuses and run.updated_at >= query.updated_since
        ]
        if len(rows) >= query.limit:
            break
    return rows[: query.limit]


def due(
    kind: str,
    labels: Iterable[str] = ("",),
    *,
    before: float,
    after: str = _FIRST,
    index: Index = BY_TIME,
) -> list[Range]:
    """What an index shows of a kind up to an instant, that one included."""
    last = f"{stamp(before)}{LAST}"
    return [
        Range(partition=each, index=index, first=after, last=last, but=after)
        for each in layout.buckets(kind, *map(str, labels))
    ]


async def _shown(
    table: Table,
    ranges: Sequence[Range],
    row_type: type[msgspec.Struct],
    limit: int,
    passes: Passes,
) -> list[Any]:
    """The rows that an index or pointers name, each once, read again by key, as far as they
    pass."""
    rows: list[Any] = []
    seen: set[Place] = set()
    async with aclosing(merged(table, ranges, limit=limit)) as items:
        while len(rows) < limit:
            named = await take(limit - len(rows), items)
            targets = [at for at in dict.fromkeys(map(target_of, named)) if at not in seen]
            seen.update(targets)
            found = await table.get_items(targets)
            fresh = [each for each in named if target_of(each) in targets]
            await table.remove([place_in(each) for each in fresh if is_dangling(each, found)])
            kept = [found[at] for at in targets if at in found]
            rows += filter(passes, decode(table, row_type, kept))
            if not named:
                break
    return rows


def decode(table: Table, row_type: type[msgspec.Struct], items: Iterable[Item]) -> list[Any]:
    """Rows, without those that cannot be decoded."""
    return list(codec_of(row_type).from_items(items, table.damage.note_skipped))


def target_of(item: Item) -> Place:
    """Where the row lies that an item of an index, or a pointer, stands for."""
    if OF not in item:
        return place_in(item)
    partition, sort = item[OF]["L"]
    return partition["S"], sort["S"]


def is_dangling(item: Item, found: Collection[Place]) -> bool:
    """A pointer whose row is gone. They are written together, so it will not come back."""
    return OF in item and target_of(item) not in found


async def take(count: int, items: AsyncGenerator[Item, None]) -> list[Item]:
    taken: list[Item] = []
    while len(taken) < count:
        item = await anext(items, None)
        if item is None:
            break
        taken.append(item)
    return taken
