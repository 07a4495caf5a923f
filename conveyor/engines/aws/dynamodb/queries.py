"""Queries: reads sorted streams of items, and merges them into one
(docs/engines.md, DynamoDB store).

A page of a sharded run needs the smallest keys of all shards. Reading `limit` rows of each shard
would read N times too much. So a query reads about `limit / N` rows of each shard, and continues
only with a shard that has run out: it reads little more than it returns. A stream follows
DynamoDB's pages to the end, including empty ones, unless its reader has a read budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

import msgspec

from conveyor.domain.changes import RunKey, TaskKey
from conveyor.domain.crawl_record import Crawl, CrawlStep
from conveyor.domain.export_record import Export
from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.model import (
    Batch,
    CounterSample,
    Crossing,
    DeletionIntent,
    Event,
    Job,
    JobInput,
    Notice,
    Run,
    ShardCounters,
    Task,
)
from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    CrawlStepsOf,
    DueCrawls,
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
    SamplesOf,
    StatsOf,
    TaskPage,
    TasksAt,
    TasksOf,
    UnfinishedCrossings,
    UnplacedEvents,
)
from conveyor.domain.schedule import Schedule
from conveyor.engines.aws.dynamodb import keys
from conveyor.engines.aws.dynamodb.items import Item, Params, codec_of
from conveyor.engines.aws.dynamodb.keys import (
    BY_OWNER,
    BY_TIME,
    PK,
    SK,
    TARGET,
    Index,
    Place,
    stamp,
)
from conveyor.engines.aws.dynamodb.table import Table, place_in
from conveyor.engines.aws.gather import gather, slices

READ_AT_ONCE_MAX = 1000  # Rows per call. DynamoDB itself ends a page at 1 MB.
# Shards are not even, so a little less than an equal share is read from each. A larger share reads
# rows that are not returned; a smaller one needs more calls.
_READ_AHEAD = 0.9
LAST = "~"
"""Sorts after every character of ids."""
BASE = Index("", PK, SK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Items of one partition of the table or of an index, between two sort keys, both included.

    `but` is excluded: the previous page ended there. `statuses` restricts the status of the rows.
    """

    partition: str
    index: Index = BASE
    first: str
    last: str
    but: str | None = None
    is_descending: bool = False
    statuses: frozenset[str] | None = None


def prefix_range(partition: str, prefix: str, index: Index = BASE) -> Range:
    return Range(partition=partition, index=index, first=prefix, last=f"{prefix}{LAST}")


@dataclass(slots=True)
class Stream:
    """Reads one range. Reads of the table are consistent, reads of an index are not."""

    table: Table
    range: Range
    ready: deque[Item] = field(default_factory=deque)
    is_over: bool = False
    _start: Any = None

    def __post_init__(self) -> None:
        key_range = self.range
        self.is_over = key_range.first > key_range.last or key_range.statuses == frozenset()

    @property
    def is_dry(self) -> bool:
        return not self.ready and not self.is_over

    @property
    def reached(self) -> str | None:
        """The sort key up to which the range was read, including rows that were filtered out."""
        return None if self._start is None else str(self._start[self.range.index.sk]["S"])

    async def read(self, count: int) -> int:
        """Makes one call. Returns how many rows it read, including those filtered out."""
        # DynamoDB applies the limit before the filter: it bounds the rows read, not those returned.
        params = self._params() | {"Limit": min(max(1, count), READ_AT_ONCE_MAX)}
        answer = await self.table.call("Query", params)
        items = answer.get("Items", ())
        self.ready.extend(item for item in items if self._sort_key(item) != self.range.but)
        looked_at = int(answer.get("ScannedCount", len(items)))
        self.table.meter.rows_read += looked_at
        self._start = answer.get("LastEvaluatedKey")
        self.is_over = not self._start
        return looked_at

    def head(self) -> str:
        return self._sort_key(self.ready[0])

    def _sort_key(self, item: Item) -> str:
        return str(item[self.range.index.sk]["S"])

    def _params(self) -> Params:
        index = self.range.index
        params: Params = {
            "TableName": self.table.name,
            "KeyConditionExpression": "#pk = :pk AND #sk BETWEEN :first AND :last",
            "ExpressionAttributeNames": {"#pk": index.pk, "#sk": index.sk},
            "ExpressionAttributeValues": {
                ":pk": {"S": self.range.partition},
                ":first": {"S": self.range.first},
                ":last": {"S": self.range.last},
            },
            "ScanIndexForward": not self.range.is_descending,
        }
        if index.name:
            params["IndexName"] = index.name
        else:
            params["ConsistentRead"] = True
        if self.range.statuses is not None:
            marks = {f":s{n}": {"S": str(s)} for n, s in enumerate(sorted(self.range.statuses))}
            params["FilterExpression"] = f"#status IN ({', '.join(marks)})"
            params["ExpressionAttributeNames"]["#status"] = "status"
            params["ExpressionAttributeValues"] |= marks
        if self._start:
            params["ExclusiveStartKey"] = self._start
        return params


@dataclass(slots=True)
class ReadBudget:
    """How many rows may still be read. If they do not suffice, `until` is the key reached."""

    rows_left: int
    until: str | None = None


async def merge_ranges(
    table: Table, ranges: Sequence[Range], *, limit: int, reach: ReadBudget | None = None
) -> AsyncGenerator[Item, None]:
    """Yields the items of all ranges in the order of their sort keys.

    `limit` is the expected number of items; it determines how much is read ahead. With a `reach`
    the stream ends where the next item is not known without reading more. Only ascending ranges
    may have one.
    """
    streams = [Stream(table, key_range) for key_range in ranges]
    choose = max if any(key_range.is_descending for key_range in ranges) else min
    yielded_count = 0
    while True:
        left = limit - yielded_count % limit
        share = left if len(streams) == 1 else max(1, int(_READ_AHEAD * left / len(streams)))
        await _fill([stream for stream in streams if stream.is_dry], share, reach)
        full = [stream for stream in streams if stream.ready]
        known = [stream.reached for stream in streams if stream.is_dry and stream.reached]
        # An item is next only if no unread shard can have a smaller key. So nothing beyond the
        # smallest key that an exhausted shard reached may be returned.
        if reach is not None and known:
            reach.until = min(known)
            full = [stream for stream in full if stream.head() <= reach.until]
        if not full:
            return
        yield choose(full, key=Stream.head).ready.popleft()
        yielded_count += 1


async def _fill(dry: Sequence[Stream], count: int, reach: ReadBudget | None) -> None:
    """Reads until no stream is dry, or the read budget is used up."""
    while dry:
        if reach is not None:
            # Each stream is read at least once, even without budget: a page that moves no shard
            # forward would never end.
            if reach.rows_left < len(dry) and all(stream.reached for stream in dry):
                return
            count = min(count, max(1, reach.rows_left // len(dry)))
        looked_at = await gather(partial(Stream.read, count=count), dry)
        if reach is not None:
            reach.rows_left -= sum(looked_at)
        dry = [stream for stream in dry if stream.is_dry]
        count *= 2  # The filter passes few rows, so read more per call.


# Queries: each query as ranges to read (docs/storage.md, Queries;
# docs/engines.md, DynamoDB store).
#
# Rows of one partition are read there, consistently and in order. Rows that an index or a pointer
# names are read again by their keys, and must still match the query. An index may be late, so such
# a query may miss a row that was just written, but it never returns a row that does not match.


_FIRST = " "  # Sorts before every character of ids.
_EVER = 9e10  # Seconds: after every instant that a row has, and no longer than `stamp` allows.
_ALL = 1000  # The read-ahead of queries without a limit.

Passes = Callable[[Any], bool]
DueQuery = (
    BatchesIn
    | DueNotices
    | DueScrubs
    | UnfinishedCrossings
    | UnplacedEvents
    | DueSchedules
    | DueExports
    | DueExpiries
    | ExpiredInputs
    | DueCrawls
)


async def find(table: Table, query: AnyQuery) -> list[Any]:
    rows = await _find(table, query)
    table.meter.rows_returned += len(rows)
    return rows


async def _find(table: Table, query: AnyQuery) -> list[Any]:
    match query:
        case TasksOf():
            return await _tasks_of(table, query)
        case TasksAt():
            return await _tasks_at(table, query)
        case StatsOf():
            return await _stats_of(table, query)
        case JobsOf():
            return await _jobs_of(table, query)
        case RunsOf():
            return await _runs_of(table, query)
        case BatchesOf():
            return await _batches_of(table, query)
        case SamplesOf():
            return await _samples_of(table, query)
        case CrawlStepsOf():
            return await _crawl_steps_of(table, query)
        case NoticesOf():
            return await _notices_of(table, query)
        case EventsOf():
            return await _events_of(table, query)
        case RunsIn():
            return await _runs_in(table, query)
        case _:
            ranges, row_type, passes = _plan_of(query)
            return await _matching(table, ranges, row_type, query.limit, passes)


def _plan_of(query: DueQuery) -> tuple[list[Range], type[msgspec.Struct], Passes]:
    """Returns the index ranges of a query, its row type, and the test that a row must pass."""
    match query:
        case BatchesIn(statuses=statuses, idle_since=by):
            ranges = due("Batch", statuses, before=by)
            return ranges, Batch, lambda row: row.status in statuses and row.updated_at <= by
        case DueNotices(statuses=statuses, due_by=by):
            ranges = due("Notice", statuses, before=by)
            return ranges, Notice, lambda row: row.status in statuses and row.due_at <= by
        case DueScrubs(due_by=by):
            return due("Scrub", before=by), DeletionIntent, lambda row: row.due_at <= by
        case UnfinishedCrossings():
            return due("Crossing", before=_EVER), Crossing, lambda _: True
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
        case DueCrawls(due_by=by):
            ranges = due("Crawl", before=by)
            return ranges, Crawl, lambda row: row.due_at is not None and row.due_at <= by
        case _:
            assert_never(query)


def _is_due(query: DueSchedules, row: Schedule) -> bool:
    if row.status not in query.statuses or row.next_fire_at is None:
        return False
    is_later = query.after is None or (row.next_fire_at, row.job_id) > query.after
    return is_later and row.next_fire_at <= query.due_by


async def _tasks_of(table: Table, query: TasksOf) -> list[Task]:
    async with aclosing(merge_ranges(table, _ranges_of(query), limit=query.limit)) as items:
        return decode(table, Task, await take(query.limit, items))


async def page_tasks(table: Table, query: TasksOf, *, read_max: int) -> TaskPage:
    """Reads at most about `read_max` rows. The page states how far it was read."""
    reach = ReadBudget(read_max)
    async with aclosing(
        merge_ranges(table, _ranges_of(query), limit=query.limit, reach=reach)
    ) as items:
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
    """Returns the range of each shard, starting after `after`."""
    prefix = _tasks_prefix(query)
    first = prefix if query.after is None else f"{prefix}{query.after}{_FIRST}"
    statuses = None if query.statuses is None else frozenset(map(str, query.statuses))
    return [
        Range(
            partition=keys.shard(query.job_id, number),
            first=first,
            last=f"{prefix}{LAST}",
            statuses=statuses,
        )
        for number in range(query.shard_count)
    ]


async def _tasks_at(table: Table, query: TasksAt) -> list[Task]:
    """Reads at half the price, and once more at the full price the rows that are not found: a row
    may have been inserted a moment ago."""
    places = [keys.item_key(TaskKey.of(ref)) for ref in query.refs]
    items = await table.get_items(places, is_consistent=False)
    if absent := [place for place in places if place not in items]:
        items |= await table.get_items(absent)
    table.meter.rows_read += len(items)
    return [codec_of(Task).from_item(item) for item in items.values()]


async def _stats_of(table: Table, query: StatsOf) -> list[ShardCounters]:
    places = [
        (keys.shard(query.job_id, number), f"Stats#{query.run_id}")
        for number in range(query.shard_count)
    ]
    items = await table.get_items(places)
    return [codec_of(ShardCounters).from_item(items[place]) for place in places if place in items]


async def _batches_of(table: Table, query: BatchesOf) -> list[Batch]:
    batches = prefix_range(keys.job(query.job_id), f"Batch#{query.run_id}#")
    async with aclosing(merge_ranges(table, [batches], limit=_ALL)) as items:
        rows = [codec_of(Batch).from_item(item) async for item in items]
    return sorted(rows, key=lambda row: (row.created_at, row.batch_id))


async def _samples_of(table: Table, query: SamplesOf) -> list[CounterSample]:
    samples = prefix_range(keys.job(query.job_id), f"Sample#{query.run_id}#")
    async with aclosing(merge_ranges(table, [samples], limit=query.limit)) as items:
        return decode(table, CounterSample, await take(query.limit, items))


async def _crawl_steps_of(table: Table, query: CrawlStepsOf) -> list[CrawlStep]:
    steps = Range(
        partition=keys.job(query.job_id),
        first=keys.crawl_step(query.run_id, query.first),
        last=f"CrawlStep#{query.run_id}#{LAST}",
    )
    async with aclosing(merge_ranges(table, [steps], limit=query.limit)) as items:
        return decode(table, CrawlStep, await take(query.limit, items))


async def _jobs_of(table: Table, query: JobsOf) -> list[Job]:
    if query.external_id is None:
        partition, index = keys.caller(query.caller), BY_OWNER
    else:
        partition, index = keys.external(query.caller, query.external_id), BY_TIME
    jobs = Range(
        partition=partition,
        index=index,
        first=_FIRST,
        last=query.before or LAST,
        but=query.before,
        is_descending=True,
    )
    return await _matching(
        table,
        [jobs],
        Job,
        query.limit,
        lambda row: row.status in query.statuses and query.type in {None, row.type},
    )


async def _runs_of(table: Table, query: RunsOf) -> list[Run]:
    runs = _backwards(
        keys.job(query.job_id),
        "Sequence#",
        None if query.before is None else keys.sequence_pointer(query.before),
    )
    return await _matching(
        table, [runs], Run, query.limit, lambda row: row.status in query.statuses
    )


async def _notices_of(table: Table, query: NoticesOf) -> list[Notice]:
    notices = _backwards(
        keys.job(query.job_id),
        "Notice#" if query.run_id is None else f"Notice#{query.run_id}#",
        None if query.before is None else keys.notice_pointer(*query.before),
    )
    return await _matching(table, [notices], Notice, query.limit, lambda _: True)


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
        partition=keys.caller(query.caller),
        first=keys.seq_pointer(max(0, query.after) + 1),
        last=f"Seq#{LAST}",
    )
    return await _matching(table, [events], Event, query.limit, lambda _: True)


async def _runs_in(table: Table, query: RunsIn) -> list[Run]:
    """Finds runs by status. The index is ordered by `updated_at`, but the query by id.

    So the keys of all changed runs are read, but only the rows of one page.
    """
    since = stamp(query.updated_since)
    ranges = [
        Range(partition=bucket, index=BY_TIME, first=since, last=LAST)
        for bucket in keys.buckets("Run", *map(str, query.statuses))
    ]
    async with aclosing(merge_ranges(table, ranges, limit=_ALL)) as items:
        # A set, because a row that changes meanwhile may appear at its old and its new position.
        places = {place_in(item) async for item in items}
    after = keys.item_key(RunKey(JobId(""), query.after or RunId("")))[1]
    in_order = sorted((place for place in places if place[1] > after), key=lambda at: at[1])
    rows: list[Run] = []
    for page_places in slices(in_order, query.limit):
        items_by_place = await table.get_items(page_places)
        read = decode(
            table, Run, [items_by_place[place] for place in page_places if place in items_by_place]
        )
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
    """Returns the index ranges of a kind up to and including an instant."""
    last = f"{stamp(before)}{LAST}"
    return [
        Range(partition=bucket, index=index, first=after, last=last, but=after)
        for bucket in keys.buckets(kind, *map(str, labels))
    ]


async def _matching(
    table: Table,
    ranges: Sequence[Range],
    row_type: type[msgspec.Struct],
    limit: int,
    passes: Passes,
) -> list[Any]:
    """Returns the rows that an index or pointers name, each once, if they still pass.

    Each row is read again by its key. Pointers without a row are removed.
    """
    rows: list[Any] = []
    seen: set[Place] = set()
    async with aclosing(merge_ranges(table, ranges, limit=limit)) as items:
        while len(rows) < limit:
            named = await take(limit - len(rows), items)
            targets = [at for at in dict.fromkeys(map(target_of, named)) if at not in seen]
            seen.update(targets)
            items_by_place = await table.get_items(targets)
            fresh = [item for item in named if target_of(item) in targets]
            # A pointer without a row would be read by every later query, so it is removed here.
            await table.remove(
                [place_in(item) for item in fresh if is_dangling(item, items_by_place)]
            )
            found_items = [items_by_place[at] for at in targets if at in items_by_place]
            rows += filter(passes, decode(table, row_type, found_items))
            if not named:
                break
    return rows


def decode(table: Table, row_type: type[msgspec.Struct], items: Iterable[Item]) -> list[Any]:
    """Decodes rows, and skips those that cannot be decoded."""
    return list(codec_of(row_type).from_items(items, table.damage.note_skipped))


def target_of(item: Item) -> Place:
    """Returns the place of the row that an index item or a pointer names."""
    if TARGET not in item:
        return place_in(item)
    partition, sort = item[TARGET]["L"]
    return partition["S"], sort["S"]


def is_dangling(item: Item, existing: Collection[Place]) -> bool:
    """Returns whether the row of a pointer was removed. Row and pointer are written in one
    transaction, so a missing row will not appear later."""
    return TARGET in item and target_of(item) not in existing


async def take(count: int, items: AsyncGenerator[Item, None]) -> list[Item]:
    taken: list[Item] = []
    while len(taken) < count:
        item = await anext(items, None)
        if item is None:
            break
        taken.append(item)
    return taken
