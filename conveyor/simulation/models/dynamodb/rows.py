"""The items of one partition in the order of their sort keys, and their earlier versions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from conveyor.engines.aws.client.usage import item_bytes
from conveyor.simulation.models.dynamodb.values import Item

# Up to this many new keys, inserting each is faster than sorting all.
_FEW = 64

Sort = tuple[str, ...]
"""The sort key of an item. In an index the item's own keys follow it, because several items may
have the same one."""


class Row:
    """An item and its size. A row never changes: a write replaces it."""

    __slots__ = ("item", "size_bytes")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.size_bytes = item_bytes(item)


@dataclass(slots=True)
class Partition:
    """`past` has the replaced versions of each item with the time of their replacement, as long as
    an eventually consistent read may return them."""

    rows: dict[Sort, Row] = field(default_factory=dict)
    past: dict[Sort, list[tuple[float, Row | None]]] = field(default_factory=dict)
    _order: list[Sort] = field(default_factory=list)
    _new: list[Sort] = field(default_factory=list)

    def put(self, sort: Sort, row: Row | None) -> None:
        if row is None:
            if self.rows.pop(sort, None) is not None:
                order = self._sorted()
                del order[bisect_left(order, sort)]
            return
        if sort not in self.rows:
            self._new.append(sort)
        self.rows[sort] = row

    def remember(self, sort: Sort, now: float, keep_s: float) -> None:
        versions = [version for version in self.past.get(sort, ()) if version[0] > now - keep_s]
        self.past[sort] = [*versions, (now, self.rows.get(sort))]

    def as_of(self, sort: Sort, instant: float) -> Row | None:
        for replaced_at, row in self.past.get(sort, ()):
            if replaced_at > instant:
                return row
        return self.rows.get(sort)

    def between(self, first: Sort, end: Sort, *, is_descending: bool) -> Iterator[Sort]:
        """The sort keys from `first` inclusive to `end` exclusive."""
        order = self._sorted()
        at, stop = bisect_left(order, first), bisect_left(order, end)
        span = range(stop - 1, at - 1, -1) if is_descending else range(at, stop)
        return (order[number] for number in span)

    def _sorted(self) -> list[Sort]:
        if len(self._new) > _FEW:
            self._order += self._new
            self._order.sort()
        else:
            for sort in self._new:
                insort(self._order, sort)
        self._new.clear()
        return self._order
