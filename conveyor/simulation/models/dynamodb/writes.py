"""Models one write of one item: it is validated and computed here, and applied by the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor.engines.aws.errors import AwsError
from conveyor.simulation.models.dynamodb import expressions
from conveyor.simulation.models.dynamodb.capacity import TABLE, Place, write_units
from conveyor.simulation.models.dynamodb.expressions import Bindings, check_placeholders
from conveyor.simulation.models.dynamodb.rows import Row
from conveyor.simulation.models.dynamodb.tables import Key, Table
from conveyor.simulation.models.dynamodb.values import (
    Item,
    NotModelled,
    check_known,
    checked,
    invalid,
)

REFUSED = "ConditionalCheckFailedException"

_NOTHING: Mapping[str, Any] = {}
_KNOWN = frozenset(
    {
        "TableName",
        "Item",
        "Key",
        "ConditionExpression",
        "UpdateExpression",
        "ExpressionAttributeNames",
        "ExpressionAttributeValues",
        "ReturnValues",
        "ReturnConsumedCapacity",
    }
)
_NO_PLACEHOLDERS: frozenset[str] = frozenset()


@dataclass(slots=True)
class Write:
    """A write that can be applied. `new` is the row afterwards. `fits` says whether its condition
    holds. `fault` is the error if the result would be invalid."""

    kind: str
    key: Key
    old: Row | None
    new: Row | None
    fits: bool
    fault: AwsError | None = None

    def units(self, table: Table) -> dict[Place, float]:
        """The units that the write consumes per partition. If the key of an index entry changes,
        the index removes one entry and adds another."""
        old_bytes = 0 if self.old is None else self.old.size_bytes
        new_bytes = 0 if self.new is None else self.new.size_bytes
        units = {(TABLE, self.key[0]): write_units(max(old_bytes, new_bytes))}
        if not self.fits or self.kind == "ConditionCheck":
            return units
        for index in table.indexes.values():
            before = index.entry(self.old, self.key)
            after = index.entry(self.new, self.key)
            if before == after and index.shows is not None:
                continue
            for entry in (before, after):
                if entry is not None:
                    place = index.name, entry[0]
                    units[place] = units.get(place, 0.0) + 1.0
        return units

    def answer(self, return_values: str) -> dict[str, Any]:
        match return_values:
            case "NONE":
                return {}
            case "ALL_OLD":
                return {} if self.old is None else {"Attributes": dict(self.old.item)}
            case "ALL_NEW" if self.new is not None:
                return {"Attributes": dict(self.new.item)}
            case _:
                raise NotModelled(f"ReturnValues {return_values}")


def checked_write(table: Table, kind: str, params: Mapping[str, Any]) -> Write:
    """Checks the request and computes the write; raises AwsError if the request itself is
    invalid."""
    check_known(kind, params, _KNOWN)
    key = table.key_of(params["Item"] if kind == "Put" else params["Key"])
    if kind != "Put" and len(params["Key"]) != 2:
        raise invalid("The provided key element does not match the schema")
    bindings = Bindings(
        params.get("ExpressionAttributeNames", _NOTHING),
        params.get("ExpressionAttributeValues", _NOTHING),
    )
    old = table.get(key)
    before: Item = {} if old is None else old.item
    text = params.get("ConditionExpression")
    condition = None if text is None else expressions.condition(text)
    change = expressions.change(params["UpdateExpression"]) if kind == "Update" else None
    check_placeholders(
        params,
        _NO_PLACEHOLDERS if condition is None else condition.placeholders,
        _NO_PLACEHOLDERS if change is None else change.placeholders,
    )
    fits = condition is None or condition.test(before, bindings)
    write = Write(kind, key, old, old, fits)
    match kind:
        case "Put":
            write.new = Row(checked(params["Item"]))
            table.check(write.new)
        case "Delete":
            write.new = None
        case "Update":
            assert change is not None
            if fits:
                _apply(table, change, bindings, write)
        case "ConditionCheck":
            pass
        case _:
            raise NotModelled(kind)
    return write


def _apply(table: Table, change: expressions.Change, bindings: Bindings, write: Write) -> None:
    targets = [bindings.name(target) for target in change.targets]
    if len(set(targets)) != len(targets):
        raise invalid("Two document paths overlap with each other")
    if table.pk in targets or table.sk in targets:
        raise invalid("Cannot update attribute: it is part of the key")
    before = table.key_item(write.key) if write.old is None else write.old.item
    after = dict(before)
    try:
        for step in change.steps:
            step(before, after, bindings)
        after |= checked({name: after[name] for name in targets if name in after})
        write.new = Row(after)
        table.check(write.new)
    except AwsError as error:
        write.fault = error


def throttled(reason: str) -> AwsError:
    code = {
        "ProvisionedThroughputExceeded": "ProvisionedThroughputExceededException",
        "ThrottlingError": "ThrottlingException",
    }[reason]
    return AwsError(code, "Throughput exceeds the current capacity of your table")
