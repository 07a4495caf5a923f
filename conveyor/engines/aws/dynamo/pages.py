"""Pages: sorted streams of items, read a little ahead, and merged into one
(docs/engines.md, DynamoDB store).

A page of a sharded run takes about `limit / shards` rows from each shard, and goes on only where
it runs dry: it reads little more than it returns. Every stream follows its pages to the end, also
over empty ones, unless its reader may go so far only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conveyor.engines.aws.dynamo.expressions import Params
from conveyor.engines.aws.dynamo.items import Item
from conveyor.engines.aws.dynamo.layout import PK, SK, Index
from conveyor.engines.aws.dynamo.table import Table
from conveyor.engines.aws.dynamo.together import together

READ_AT_ONCE_MAX = 1000
# Shards are not even: of what is left, a little less than their share is read ahead.
_CAUTION = 0.9
LAST = "~"
"""Sorts behind anything that ids are made of."""
BASE = Index("", PK, SK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Items of one partition of the table, or of an index, from one sort key to another.

    `but` is left out: where the page before ended. `statuses` is what their status may be.
    """

    partition: str
    index: Index = BASE
    first: str
    last: str
    but: str | None = None
    is_descending: bool = False
    statuses: frozenset[str] | None = None


def starting_with(partition: str, prefix: str, index: Index = BASE) -> Range:
    return Range(partition=partition, index=index, first=prefix, last=f"{prefix}{LAST}")


@dataclass(slots=True)
class Stream:
    """One range being read. What is read by key is consistent, what an index shows is not."""

    table: Table
    range: Range
    ready: deque[Item] = field(default_factory=deque)
    is_over: bool = False
    _start: Any = None

    def __post_init__(self) -> None:
        asked = self.range
        self.is_over = asked.first > asked.last or asked.statuses == frozenset()

    @property
    def is_dry(self) -> bool:
        return not self.ready and not self.is_over

    @property
    def reached(self) -> str | None:
        """The sort key up to which it was read, what did not pass included."""
        return None if self._start is None else str(self._start[self.range.index.sk]["S"])

    async def read(self, count: int) -> int:
        """Reads on, once; answers how many rows were looked at for it."""
        params = self._params() | {"Limit": min(max(1, count), READ_AT_ONCE_MAX)}
        answer = await self.table.call("Query", params)
        items = answer.get("Items", ())
        self.ready.extend(each for each in items if self._sort_key(each) != self.range.but)
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
class Reach:
    """How many rows may still be read. Where they do not suffice, `until` is how far they went."""

    rows_left: int
    until: str | None = None


async def merged(
    table: Table, ranges: Sequence[Range], *, limit: int, reach: Reach | None = None
) -> AsyncGenerator[Item, None]:
    """The items of all ranges in the order of their sort keys; `limit` is how many are expected.

    With a `reach` it ends where nobody knows without reading more what comes next. Only ascending
    ranges have one.
    """
    streams = [Stream(table, each) for each in ranges]
    choose = max if any(each.is_descending for each in ranges) else min
    given = 0
    while True:
        left = limit - given % limit
        share = left if len(streams) == 1 else max(1, int(_CAUTION * left / len(streams)))
        await _fill([stream for stream in streams if stream.is_dry], share, reach)
        full = [stream for stream in streams if stream.ready]
        known = [stream.reached for stream in streams if stream.is_dry and stream.reached]
        if reach is not None and known:
            reach.until = min(known)
            full = [stream for stream in full if stream.head() <= reach.until]
        if not full:
            return
        yield choose(full, key=Stream.head).ready.popleft()
        given += 1


async def _fill(dry: Sequence[Stream], count: int, reach: Reach | None) -> None:
    """Reads on until none is dry, or no more may be read; each gets somewhere at least."""
    while dry:
        if reach is not None:
            if reach.rows_left < len(dry) and all(stream.reached for stream in dry):
                return
            count = min(count, max(1, reach.rows_left // len(dry)))
        looked_at = await together(partial(Stream.read, count=count), dry)
        if reach is not None:
            reach.rows_left -= sum(looked_at)
        dry = [stream for stream in dry if stream.is_dry]
        count *= 2  # What is sought is rare: look at more at once.
