"""Models tables: items by key, indexes that may lag behind, and expiry that may happen late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from conveyor.simulation.models.dynamodb.rows import Partition, Row, Sort
from conveyor.simulation.models.dynamodb.values import Item, NotModelled, invalid
from conveyor.simulation.models.fault_source import FaultSource

# The limit of DynamoDB for one item.
ITEM_BYTES_MAX = 400 * 1024

Key = tuple[str, str]


@dataclass(slots=True)
class IndexLag:
    """The lag of an index for one item: the version that it shows, and the number of later changes
    that it does not show yet."""

    visible: Row | None
    due_at: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Index:
    """`shows` has the attributes that the index contains; None means all."""

    name: str
    pk: str
    sk: str
    shows: frozenset[str] | None
    partitions: dict[str, Partition] = field(default_factory=dict)
    late: dict[Key, IndexLag] = field(default_factory=dict)

    def entry(self, row: Row | None, key: Key) -> tuple[str, Sort] | None:
        """The partition and sort key of the row in the index; None if the index does not contain
        it."""
        if row is None or self.pk not in row.item or self.sk not in row.item:
            return None
        item = row.item
        return item[self.pk]["S"], (item[self.sk]["S"], *key)

    def view(self, row: Row) -> Row:
        if self.shows is None:
            return row
        return Row({name: value for name, value in row.item.items() if name in self.shows})

    def show(self, key: Key, old: Row | None, new: Row | None) -> None:
        """Replaces the entry of an item in the index."""
        before = self.entry(old, key)
        after = self.entry(new, key)
        if before is not None and before != after:
            self.partition(before[0]).put(before[1], None)
        if after is not None and new is not None:
            self.partition(after[0]).put(after[1], self.view(new))

    def partition(self, name: str) -> Partition:
        partition = self.partitions.get(name)
        if partition is None:
            partition = self.partitions[name] = Partition()
        return partition


@dataclass(slots=True)
class Table:
    """One table. A write schedules when the indexes show it, and `settle` applies what is due.
    `written` collects the keys of written rows; a reader that polls for changes clears it."""

    definition: Mapping[str, Any]
    fault_source: FaultSource
    now: Callable[[], float]
    pk: str
    sk: str
    indexes: dict[str, Index]
    expiry: str | None = None
    partitions: dict[str, Partition] = field(default_factory=dict)
    _due_changes: list[tuple[float, int, str, Key, Row | None]] = field(default_factory=list)
    _expiring: list[tuple[float, int, Key]] = field(default_factory=list)
    _expires_at: dict[Key, float] = field(default_factory=dict)
    _number: int = 0
    written: dict[Key, None] = field(default_factory=dict)

    def key_of(self, item: Mapping[str, Any]) -> Key:
        try:
            key = item[self.pk]["S"], item[self.sk]["S"]
        except KeyError:
            raise invalid("One of the required keys was not given a value") from None
        if not key[0] or not key[1]:
            raise invalid("One or more parameter values are not valid: an empty string in a key")
        return key

    def key_item(self, key: Key) -> Item:
        return {self.pk: {"S": key[0]}, self.sk: {"S": key[1]}}

    def get(self, key: Key) -> Row | None:
        partition = self.partitions.get(key[0])
        return None if partition is None else partition.rows.get((key[1],))

    def partition(self, name: str) -> Partition:
        partition = self.partitions.get(name)
        if partition is None:
            partition = self.partitions[name] = Partition()
        return partition

    def check(self, row: Row) -> None:
        if row.size_bytes > ITEM_BYTES_MAX:
            raise invalid("Item size has exceeded the maximum allowed size")
        for index in self.indexes.values():
            for part in (index.pk, index.sk):
                if part in row.item and not row.item[part].get("S"):
                    raise invalid(f"Type mismatch for Index Key {part}, or it is empty")

    def put(self, key: Key, row: Row | None) -> None:
        """Writes the row, or removes it if `row` is None."""
        old, partition, sort = self.get(key), self.partition(key[0]), (key[1],)
        faults = self.fault_source.service_rates.dynamodb
        if faults.stale_read_rate:
            partition.remember(sort, self.now(), faults.stale_read_s)
        partition.put(sort, row)
        self.written[key] = None
        for index in self.indexes.values():
            self._update_index(index, key, old, row)
        if self.expiry is not None and row is not None and self.expiry in row.item:
            self._expire_later(key, row)

    def settle(self) -> None:
        """Shows changes that are due in the indexes, and removes expired rows."""
        now = self.now()
        while self._due_changes and self._due_changes[0][0] <= now:
            _, _, name, key, row = heappop(self._due_changes)
            index = self.indexes[name]
            late = index.late[key]
            index.show(key, late.visible, row)
            late.visible, late.count = row, late.count - 1
            if not late.count:
                del index.late[key]
        # A row expires after its instant has passed. Rows of this very instant would only be
        # scheduled again.
        while self._expiring and self._expiring[0][0] < now:
            self._expire(heappop(self._expiring)[2], now)

    def _update_index(self, index: Index, key: Key, old: Row | None, new: Row | None) -> None:
        faults = self.fault_source.service_rates.dynamodb
        is_late = self.fault_source.occurs("dynamodb.late_index", faults.late_index_rate)
        if not is_late and key not in index.late:
            index.show(key, old, new)
            return
        late = index.late.setdefault(key, IndexLag(old))
        due_at = self.now() + (self.fault_source.seconds(faults.late_index_s) if is_late else 0.0)
        # An index shows the changes of one item in their order; changes of other items may appear
        # before them.
        late.due_at, late.count = max(due_at, late.due_at), late.count + 1
        self._number += 1
        heappush(self._due_changes, (late.due_at, self._number, index.name, key, new))

    def _expire_later(self, key: Key, row: Row) -> None:
        at = self._instant(row)
        if at is None or key in self._expires_at:
            return
        self._expires_at[key] = at
        faults = self.fault_source.service_rates.dynamodb
        if self.fault_source.occurs("dynamodb.never_expires", faults.never_expires_rate):
            return
        if self.fault_source.occurs("dynamodb.late_expiry", faults.late_expiry_rate):
            at += self.fault_source.seconds(faults.late_expiry_s)
        self._number += 1
        heappush(self._expiring, (at, self._number, key))

    def _expire(self, key: Key, now: float) -> None:
        del self._expires_at[key]
        row = self.get(key)
        at = None if row is None else self._instant(row)
        if row is None or at is None:
            return
        if at < now:
            self.put(key, None)
        else:
            self._expire_later(key, row)

    def _instant(self, row: Row) -> float | None:
        """The instant at which a row expires. DynamoDB ignores values that are no numbers."""
        if self.expiry is None or "N" not in row.item.get(self.expiry, ()):
            return None
        return float(row.item[self.expiry]["N"])


def table_of(
    definition: Mapping[str, Any], fault_source: FaultSource, now: Callable[[], float]
) -> Table:
    """Makes a table from the parameters of CreateTable."""
    kinds = {attribute["AttributeType"] for attribute in definition["AttributeDefinitions"]}
    if kinds != {"S"}:
        raise NotModelled("keys that are no strings")
    pk, sk = _names(definition["KeySchema"])
    indexes = {}
    for index in definition.get("GlobalSecondaryIndexes", ()):
        index_pk, index_sk = _names(index["KeySchema"])
        projection = index["Projection"]
        shows: frozenset[str] | None = frozenset(
            {pk, sk, index_pk, index_sk, *projection.get("NonKeyAttributes", ())}
        )
        if projection["ProjectionType"] == "ALL":
            shows = None
        indexes[index["IndexName"]] = Index(index["IndexName"], index_pk, index_sk, shows)
    return Table(definition, fault_source, now, pk, sk, indexes)


def _names(schema: list[dict[str, str]]) -> Key:
    by_kind = {element["KeyType"]: element["AttributeName"] for element in schema}
    if by_kind.keys() != {"HASH", "RANGE"}:
        raise NotModelled("a table or index without a sort key")
    return by_kind["HASH"], by_kind["RANGE"]
