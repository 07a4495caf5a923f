"""Models queries: the items of a part of a partition, in order, one page at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conveyor.simulation.models.dynamodb import expressions
from conveyor.simulation.models.dynamodb.capacity import TABLE, Capacity, read_units
from conveyor.simulation.models.dynamodb.expressions import Bindings, check_placeholders
from conveyor.simulation.models.dynamodb.rows import Partition, Row, Sort
from conveyor.simulation.models.dynamodb.tables import Index, Key, Table
from conveyor.simulation.models.dynamodb.values import Item, check_known, invalid
from conveyor.simulation.models.dynamodb.writes import throttled

# The limit of DynamoDB for one page of a query.
PAGE_BYTES_MAX = 1024 * 1024

_KNOWN = frozenset(
    {
        "TableName",
        "IndexName",
        "KeyConditionExpression",
        "FilterExpression",
        "ProjectionExpression",
        "ExpressionAttributeNames",
        "ExpressionAttributeValues",
        "ExclusiveStartKey",
        "Limit",
        "ScanIndexForward",
        "ConsistentRead",
        "ReturnConsumedCapacity",
    }
)
_NOTHING: Mapping[str, Any] = {}
_NO_PLACEHOLDERS: frozenset[str] = frozenset()
# Appended to a sort key, it gives the next possible one.
_NEXT = "\0"
_BELOW_ALL, _ABOVE_ALL = "\0", "\U0010ffff"

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """The requested range of a partition: from `first` inclusive to `end` exclusive, and its
    direction."""

    partition: str
    first: Sort
    end: Sort
    is_descending: bool


@dataclass(slots=True)
class _Page:
    """A page: its items and size. `last` is the key of its last item, None if it is the final
    page."""

    items: list[Item] = field(default_factory=list)
    scanned: int = 0
    size_bytes: int = 0
    last: Item | None = None


def query(table: Table, capacity: Capacity, params: Params) -> dict[str, Any]:
    """Answers one page of a query."""
    check_known("Query", params, _KNOWN)
    index = _index(table, params)
    bindings = Bindings(
        params.get("ExpressionAttributeNames", _NOTHING),
        params.get("ExpressionAttributeValues", _NOTHING),
    )
    text = params.get("FilterExpression")
    condition = None if text is None else expressions.condition(text)
    key_range = _find_range(
        table,
        index,
        params,
        bindings,
        _NO_PLACEHOLDERS if condition is None else condition.placeholders,
    )
    page = _scanned(
        table,
        index,
        key_range,
        params,
        lambda row: condition is None or condition.test(row, bindings),
    )
    units = read_units(page.size_bytes, is_consistent=bool(params.get("ConsistentRead")))
    place = TABLE if index is None else index.name, key_range.partition
    refusal = capacity.take_reads({place: units})
    if refusal is not None:
        raise throttled(refusal)
    answer: dict[str, Any] = {
        "Items": page.items,
        "Count": len(page.items),
        "ScannedCount": page.scanned,
    }
    if page.last is not None:
        answer["LastEvaluatedKey"] = page.last
        if not page.items:
            table.fault_source.count("dynamodb.empty_page")
    if params.get("ReturnConsumedCapacity", "NONE") != "NONE":
        answer["ConsumedCapacity"] = {"TableName": params["TableName"], "CapacityUnits": units}
    return answer


def _scanned(
    table: Table,
    index: Index | None,
    key_range: _KeyRange,
    params: Params,
    is_kept: Callable[[Item], bool],
) -> _Page:
    page, scanned_max = _Page(), _scanned_max(table, params)
    if not scanned_max:
        page.last = params.get("ExclusiveStartKey") or _before(table, index, key_range)
        return page
    partition = (table if index is None else index).partitions.get(key_range.partition, Partition())
    for sort, row in _rows(table, partition, key_range, params):
        page.scanned, page.size_bytes = page.scanned + 1, page.size_bytes + row.size_bytes
        if is_kept(row.item):
            page.items.append(projected(row.item, params))
        if page.scanned == scanned_max or page.size_bytes >= PAGE_BYTES_MAX:
            page.last = _place(table, index, key_range.partition, sort)
            break
    return page


def read_row(table: Table, key: Key, *, is_consistent: bool) -> Row | None:
    """The row. A read that is not consistent may get an older version of it."""
    partition = table.partitions.get(key[0])
    if partition is None:
        return None
    faults = table.fault_source.service_rates.dynamodb
    sort = (key[1],)
    is_stale = not is_consistent and sort in partition.past
    if not is_stale or not table.fault_source.occurs("dynamodb.stale_read", faults.stale_read_rate):
        return partition.rows.get(sort)
    return partition.as_of(
        sort, table.now() - table.fault_source.seconds((0.0, faults.stale_read_s))
    )


def projected(item: Item, params: Params) -> Item:
    """The item with only the attributes that the request asks for."""
    text = params.get("ProjectionExpression")
    if text is None:
        return dict(item)
    names = params.get("ExpressionAttributeNames", _NOTHING)
    bindings = Bindings(names, _NOTHING)
    attributes = [bindings.name(placeholder) for placeholder in expressions.projection(text)[0]]
    return {name: item[name] for name in attributes if name in item}


def _index(table: Table, params: Params) -> Index | None:
    name = params.get("IndexName")
    if name is None:
        return None
    if name not in table.indexes:
        raise invalid(f"The table does not have the specified index: {name}")
    if params.get("ConsistentRead"):
        raise invalid("Consistent reads are not supported on global secondary indexes")
    return table.indexes[name]


def _find_range(
    table: Table,
    index: Index | None,
    params: Params,
    bindings: Bindings,
    filter_placeholders: frozenset[str],
) -> _KeyRange:
    condition = expressions.key_condition(params["KeyConditionExpression"])
    text = params.get("ProjectionExpression")
    projection_placeholders = _NO_PLACEHOLDERS if text is None else expressions.projection(text)[1]
    check_placeholders(params, condition.placeholders, filter_placeholders, projection_placeholders)
    pk, sk = (table.pk, table.sk) if index is None else (index.pk, index.sk)
    name, placeholder = condition.partition
    if bindings.name(name) != pk:
        raise invalid(f"Query condition missed key schema element: {pk}")
    first, end = _BELOW_ALL, _ABOVE_ALL
    if condition.sort is not None:
        sort_name, sign, placeholders = condition.sort
        if bindings.name(sort_name) != sk:
            raise invalid(f"Query condition missed key schema element: {sk}")
        first, end = _bounds(
            sign, [bindings.value(value_placeholder)["S"] for value_placeholder in placeholders]
        )
    partition = bindings.value(placeholder)["S"]
    if not partition:
        raise invalid("One or more parameter values are not valid: an empty string in a key")
    is_descending = not params.get("ScanIndexForward", True)
    return _KeyRange(partition, (first,), (end,), is_descending)


def _bounds(sign: str, operands: list[str]) -> tuple[str, str]:
    one = operands[0]
    match sign:
        case "=":
            return one, one + _NEXT
        case "BETWEEN":
            if one > operands[1]:
                raise invalid("The BETWEEN operator requires upper bound to be at least the lower")
            return one, operands[1] + _NEXT
        case "begins_with":
            return one, one + _ABOVE_ALL
        case "<":
            return _BELOW_ALL, one
        case "<=":
            return _BELOW_ALL, one + _NEXT
        case ">":
            return one + _NEXT, _ABOVE_ALL
        case _:
            return one, _ABOVE_ALL


def _rows(
    table: Table, partition: Partition, key_range: _KeyRange, params: Params
) -> Iterator[tuple[Sort, Row]]:
    first, end = key_range.first, key_range.end
    if "ExclusiveStartKey" in params:
        start = _sort_of(table, params)
        if key_range.is_descending:
            end = min(end, start)
        else:
            first = max(first, (*start[:-1], start[-1] + _NEXT))
    sorts = partition.between(first, end, is_descending=key_range.is_descending)
    if params.get("ConsistentRead") or "IndexName" in params or not partition.past:
        return ((sort, partition.rows[sort]) for sort in sorts)
    return _perhaps_stale(table, partition, key_range, first, end)


def _perhaps_stale(
    table: Table, partition: Partition, key_range: _KeyRange, first: Sort, end: Sort
) -> Iterator[tuple[Sort, Row]]:
    """The rows of a read that is not consistent: older versions, and rows that were removed, may
    appear."""
    gone = [
        sort_key
        for sort_key in partition.past
        if first <= sort_key < end and sort_key not in partition.rows
    ]
    there = partition.between(first, end, is_descending=False)
    for sort in sorted([*there, *gone], reverse=key_range.is_descending):
        row = read_row(table, (key_range.partition, sort[0]), is_consistent=False)
        if row is not None:
            yield sort, row


def _scanned_max(table: Table, params: Params) -> int:
    """How many rows this page reads at most. With a fault it reads fewer, or none, as DynamoDB
    may."""
    limit = params.get("Limit")
    if limit is not None and limit < 1:
        raise invalid("Limit must be at least 1")
    most = int(limit) if limit is not None else 1 << 60
    rate = table.fault_source.service_rates.dynamodb.short_page_rate
    if table.fault_source.occurs("dynamodb.short_page", rate):
        return table.fault_source.below(min(most, 8))
    return most


def _sort_of(table: Table, params: Params) -> Sort:
    start = params["ExclusiveStartKey"]
    name = params.get("IndexName")
    if name is None:
        return (start[table.sk]["S"],)
    return start[table.indexes[name].sk]["S"], start[table.pk]["S"], start[table.sk]["S"]


def _place(table: Table, index: Index | None, partition: str, sort: Sort) -> Item:
    if index is None:
        return table.key_item((partition, sort[0]))
    at: Item = {index.pk: {"S": partition}, index.sk: {"S": sort[0]}}
    return at | table.key_item((sort[1], sort[2]))


def _before(table: Table, index: Index | None, key_range: _KeyRange) -> Item:
    """A key before the first one: the page ended before it read any row."""
    edge = _ABOVE_ALL if key_range.is_descending else _BELOW_ALL
    return _place(table, index, key_range.partition, (edge, edge, edge))
