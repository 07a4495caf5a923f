"""Expressions: translates guards and writes to DynamoDB's syntax (docs/engines.md, DynamoDB store).

Names and values are always parameters, because many field names are reserved words of DynamoDB.
Every update has the condition that its row exists: UpdateItem would create the row otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import msgspec

from conveyor.domain.changes import AnyKey, Delete, Guard, Insert, Row, Update
from conveyor.engines.aws.dynamodb.item_codec import Attribute, Codec, Item, codec_of, to_attribute
from conveyor.engines.aws.dynamodb.keys import (
    DERIVED,
    EXPIRING,
    PK,
    POINTERS,
    ROW_TYPES,
    SK,
    TARGET,
    TTL,
    Place,
    item_key,
)

Params = dict[str, Any]


def key_item(place: Place) -> Item:
    return {PK: {"S": place[0]}, SK: {"S": place[1]}}


def codec_for(key: AnyKey) -> Codec:
    return codec_of(ROW_TYPES[type(key)])


def to_item(key: AnyKey, row: Row) -> Item:
    """Returns the item of a row: its key, its fields, its index attributes and its expiry."""
    fields = msgspec.structs.asdict(row)
    item = key_item(item_key(key)) | codec_for(key).to_item(row)
    for each in DERIVED.get(type(key), ()):
        shown = each.make(fields)
        if shown is not None:
            item[each.attribute] = {"S": shown}
    if type(key) in EXPIRING:
        item[TTL] = _ttl(key, fields["expires_at"])
    return item


def pointer_item(key: AnyKey, fields: dict[str, Any]) -> Item | None:
    """Returns the pointer to a row with these fields; None if they do not determine one."""
    pointer = POINTERS.get(type(key))
    if pointer is None or pointer.field not in fields:
        return None
    place = pointer.make(msgspec.structs.asdict(key) | fields)
    if place is None:
        return None
    return key_item(place) | {TARGET: {"L": [{"S": part} for part in item_key(key)]}}


class Expression:
    """Builds one write or check of one item: collects its names and values."""

    def __init__(self, key: AnyKey) -> None:
        self.key = key
        self.codec = codec_for(key)
        self._names: dict[str, str] = {}
        self._values: Item = {}

    def params(self, table: str, **clauses: str) -> Params:
        params: Params = {"TableName": table, "Key": key_item(item_key(self.key))}
        params |= {name: text for name, text in clauses.items() if text}
        if self._names:
            params["ExpressionAttributeNames"] = self._names
        if self._values:
            params["ExpressionAttributeValues"] = self._values
        return params

    def present(self, guard: Guard) -> str:
        return " AND ".join([f"attribute_exists({PK})", *self._facts(guard)])

    def absent_or(self, guard: Guard) -> str:
        facts = " AND ".join(self._facts(guard))
        return f"attribute_not_exists({PK}) OR {facts}" if facts else ""

    def absent_or_expired(self, now: float | None) -> str:
        absent = f"attribute_not_exists({PK})"
        if now is None:
            return absent
        return f"{absent} OR {self._name('expires_at')} < {self.value(to_attribute(now))}"

    def changes(self, update: Update) -> str:
        sets, removes = [], []
        for name, attribute in self._attributes(update):
            if attribute is None:
                removes.append(self._name(name))
            else:
                sets.append(f"{self._name(name)} = {self.value(attribute)}")
        adds = [
            f"{self._name(name)} {self.value(to_attribute(delta))}"
            for name, delta in update.deltas.items()
        ]
        clauses = {"SET": sets, "REMOVE": removes, "ADD": adds}
        return " ".join(f"{verb} {', '.join(each)}" for verb, each in clauses.items() if each)

    def _attributes(self, update: Update) -> Iterator[tuple[str, Attribute | None]]:
        """Yields the attributes that the update sets, or removes (None), with those of indexes."""
        key, values = update.key, update.values
        for name, value in values.items():
            yield name, None if self.codec.omits(name, value) else to_attribute(value)
        known = msgspec.structs.asdict(key) | values
        for each in DERIVED.get(type(key), ()):
            # The new value of a delta is not known here, so no index attribute can depend on one.
            assert not each.fields & update.deltas.keys(), "an index goes by what is set"
            if each.fields & values.keys():
                shown = each.make(known)
                yield each.attribute, None if shown is None else {"S": shown}
        if type(key) in EXPIRING and "expires_at" in values:
            yield TTL, _ttl(key, values["expires_at"])

    def _facts(self, guard: Guard) -> list[str]:
        facts = []
        if guard.status_in is not None:
            marks = [self.value({"S": str.__str__(each)}) for each in sorted(guard.status_in)]
            # `IN ()` is a syntax error. A guard without statuses admits no row, so use a condition
            # that no existing row passes.
            nowhere = f"attribute_not_exists({PK})"
            facts.append(f"{self._name('status')} IN ({', '.join(marks)})" if marks else nowhere)
        facts += [self._equals(name, value) for name, value in guard.equals]
        if guard.lapsed is not None:
            facts.append(self._compared(guard.lapsed[0], "<", guard.lapsed[1]))
        if guard.at_least is not None:
            facts.append(self._compared(guard.at_least[0], ">=", guard.at_least[1]))
        return facts

    def _equals(self, name: str, value: Any) -> str:
        if value is None and self.codec.omits(name, value):
            return f"attribute_not_exists({self._name(name)})"
        # A missing attribute means the default: the codec omits empty defaults, and the row may be
        # older than the field.
        equal = f"{self._name(name)} = {self.value(to_attribute(value))}"
        if self.codec.is_default(name, value):
            return f"(attribute_not_exists({self._name(name)}) OR {equal})"
        return equal

    def _compared(self, name: str, sign: str, bound: float) -> str:
        fact = f"{self._name(name)} {sign} {self.value(to_attribute(bound))}"
        # A missing attribute has its default. DynamoDB compares nothing with a missing attribute,
        # so the default is compared here.
        default = self.codec.defaults.get(name)
        if default is not None and (default < bound if sign == "<" else default >= bound):
            return f"(attribute_not_exists({self._name(name)}) OR {fact})"
        return fact

    def _name(self, name: str) -> str:
        self._names[f"#{name}"] = name
        return f"#{name}"

    def value(self, attribute: Attribute) -> str:
        mark = f":{len(self._values)}"
        self._values[mark] = attribute
        return mark


def put(table: str, write: Insert) -> Params:
    expression = Expression(write.key)
    condition = expression.absent_or_expired(write.over_expired_at)
    params = expression.params(table, ConditionExpression=condition)
    # PutItem takes the key as part of the item.
    del params["Key"]
    return params | {"Item": to_item(write.key, write.row)}


def update(table: str, write: Update) -> Params:
    expression = Expression(write.key)
    changes = expression.changes(write)
    return expression.params(
        table, UpdateExpression=changes, ConditionExpression=expression.present(write.guard)
    )


def check(table: str, key: AnyKey, guard: Guard) -> Params:
    expression = Expression(key)
    return expression.params(table, ConditionExpression=expression.present(guard))


def delete(table: str, write: Delete) -> Params:
    expression = Expression(write.key)
    return expression.params(table, ConditionExpression=expression.absent_or(write.guard))


def _ttl(key: AnyKey, expires_at: float) -> Attribute:
    """Returns the expiry in whole seconds, rounded up: DynamoDB ignores fractions."""
    return {"N": str(ceil(expires_at + EXPIRING[type(key)]))}
