"""Items: converts rows to DynamoDB's attributes and back, and guards and writes to its expressions
(docs/storage.md, DynamoDB table; docs/engines.md, DynamoDB store).

Texts and enums are S, numbers and instants N, booleans BOOL, and composite values JSON in an S. A
field that is empty and empty by default is omitted, so that a task stays below one write unit. The
mapping is derived from the types of the fields.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

from conveyor.domain.changes import KIND_OF_KEY, AnyKey, Delete, Guard, Insert, Row, Update
from conveyor.domain.damage import UNREADABLE, salvage_task
from conveyor.domain.model import Task
from conveyor.engines.aws.dynamodb.keys import (
    DERIVED,
    EXPIRING,
    PK,
    POINTERS,
    SK,
    TARGET,
    TTL,
    Place,
    item_key,
)
from conveyor.ports.errors import RowDamaged

Attribute = dict[str, Any]
Item = dict[str, Attribute]

_PLAIN = (str, int, float, bool)
_decode_json = msgspec.json.decode


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """The mapping of one row type."""

    row_type: type[msgspec.Struct]
    defaults: Mapping[str, Any]
    composite: frozenset[str]

    def to_item(self, row: msgspec.Struct) -> Item:
        fields = zip(self.row_type.__struct_fields__, msgspec.structs.astuple(row), strict=True)
        return {name: to_attribute(value) for name, value in fields if not self.omits(name, value)}

    def from_item(self, item: Item) -> Any:
        """Decodes an item. Ignores attributes that are not fields, such as those of indexes.

        A task with undecodable fields becomes a DamagedTask. Any other undecodable row raises
        RowDamaged.
        """
        try:
            names = [name for name in self.row_type.__struct_fields__ if name in item]
            values = {name: self._value(name, item[name]) for name in names}
            return msgspec.convert(values, self.row_type)
        except UNREADABLE as error:
            return self._salvage(item, error)

    def _value(self, name: str, attribute: Attribute) -> Any:
        value = from_attribute(attribute)
        is_json = name in self.composite and value is not None
        return _decode_json(value) if is_json else value

    def _salvage(self, item: Item, cause: Exception) -> Any:
        hints = get_type_hints(self.row_type)
        readable: dict[str, Any] = {}
        damaged: list[str] = []
        for name in self.row_type.__struct_fields__:
            if name in item:
                try:
                    readable[name] = msgspec.convert(self._value(name, item[name]), hints[name])
                except UNREADABLE:
                    damaged.append(name)
            elif name not in self.defaults:
                damaged.append(name)
        task = salvage_task(readable, damaged) if self.row_type is Task else None
        if task is None:
            address = "/".join(str(item.get(name, {}).get("S", "?")) for name in ("pk", "sk"))
            raise RowDamaged(self.row_type.__name__, address, str(cause)) from cause
        return task

    def from_items(
        self, items: Iterable[Item], note_damage: Callable[[RowDamaged], None]
    ) -> Iterator[Any]:
        """Yields the rows that can be decoded, and reports the others to `note_damage`."""
        for item in items:
            try:
                row = self.from_item(item)
            except RowDamaged as error:
                note_damage(error)
            else:
                yield row

    def omits(self, name: str, value: Any) -> bool:
        """Returns whether a missing attribute means this value."""
        return not value and self.is_default(name, value)

    def is_default(self, name: str, value: Any) -> bool:
        return name in self.defaults and bool(self.defaults[name] == value)


@lru_cache
def codec_of(row_type: type[msgspec.Struct]) -> Codec:
    hints = get_type_hints(row_type)
    defaults = {
        field.name: field.default
        if field.default is not msgspec.NODEFAULT
        else field.default_factory()
        for field in msgspec.structs.fields(row_type)
        if not field.required
    }
    composite = (name for name in row_type.__struct_fields__ if not _is_plain(hints[name]))
    return Codec(row_type, defaults, frozenset(composite))


def to_attribute(value: Any) -> Attribute:
    if isinstance(value, str):
        return {"S": str.__str__(value)}
    # Before int, because a bool is an int in Python.
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int | float):
        # repr is exact: `float(repr(x)) == x`, so guards that compare an instant match.
        return {"N": repr(value)}
    if value is None:
        return {"NULL": True}
    return {"S": msgspec.json.encode(value).decode()}


def from_attribute(attribute: Attribute) -> Any:
    ((kind, value),) = attribute.items()
    if kind == "N":
        return int(value) if value.lstrip("-").isdigit() else float(value)
    return None if kind == "NULL" else value


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) in {Union, types.UnionType}:
        rest = [argument for argument in get_args(hint) if argument is not types.NoneType]
        return len(rest) == 1 and _is_plain(rest[0])
    if isinstance(hint, NewType):
        return _is_plain(hint.__supertype__)
    return hint in _PLAIN or (isinstance(hint, type) and issubclass(hint, enum.StrEnum))


# Expressions: guards and writes in DynamoDB's syntax.
#
# Names and values are always parameters, because many field names are reserved words of DynamoDB.
# Every update has the condition that its row exists: UpdateItem would create the row otherwise.


Params = dict[str, Any]


def key_item(place: Place) -> Item:
    return {PK: {"S": place[0]}, SK: {"S": place[1]}}


def codec_for(key: AnyKey) -> Codec:
    return codec_of(KIND_OF_KEY[type(key)].row_type)


def to_item(key: AnyKey, row: Row) -> Item:
    """Returns the item of a row: its key, its fields, its index attributes and its expiry."""
    fields = msgspec.structs.asdict(row)
    item = key_item(item_key(key)) | codec_for(key).to_item(row)
    for derived in DERIVED.get(type(key), ()):
        value = derived.make(fields)
        if value is not None:
            item[derived.attribute] = {"S": value}
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
        return " ".join(f"{verb} {', '.join(terms)}" for verb, terms in clauses.items() if terms)

    def _attributes(self, update: Update) -> Iterator[tuple[str, Attribute | None]]:
        """Yields the attributes that the update sets, or removes (None), with those of indexes."""
        key, values = update.key, update.values
        for name, value in values.items():
            yield name, None if self.codec.omits(name, value) else to_attribute(value)
        known = msgspec.structs.asdict(key) | values
        for derived in DERIVED.get(type(key), ()):
            # The new value of a delta is not known here, so no index attribute can depend on one.
            assert not derived.fields & update.deltas.keys(), "an index goes by what is set"
            if derived.fields & values.keys():
                attribute_value = derived.make(known)
                yield derived.attribute, None if attribute_value is None else {"S": attribute_value}
        if type(key) in EXPIRING and "expires_at" in values:
            yield TTL, _ttl(key, values["expires_at"])

    def _facts(self, guard: Guard) -> list[str]:
        facts = []
        if guard.status_in is not None:
            marks = [self.value({"S": str.__str__(status)}) for status in sorted(guard.status_in)]
            # `IN ()` is a syntax error. A guard without statuses admits no row, so use a condition
            # that no existing row passes.
            nowhere = f"attribute_not_exists({PK})"
            facts.append(f"{self._name('status')} IN ({', '.join(marks)})" if marks else nowhere)
        facts += [self._equals(name, value) for name, value in guard.equals]
        if guard.lapsed is not None:
            facts.append(self._comparison(guard.lapsed[0], "<", guard.lapsed[1]))
        if guard.at_least is not None:
            facts.append(self._comparison(guard.at_least[0], ">=", guard.at_least[1]))
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

    def _comparison(self, name: str, sign: str, bound: float) -> str:
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


def put_params(table: str, write: Insert) -> Params:
    expression = Expression(write.key)
    condition = expression.absent_or_expired(write.over_expired_at)
    params = expression.params(table, ConditionExpression=condition)
    # PutItem takes the key as part of the item.
    del params["Key"]
    return params | {"Item": to_item(write.key, write.row)}


def update_params(table: str, write: Update) -> Params:
    expression = Expression(write.key)
    changes = expression.changes(write)
    return expression.params(
        table, UpdateExpression=changes, ConditionExpression=expression.present(write.guard)
    )


def check_params(table: str, key: AnyKey, guard: Guard) -> Params:
    expression = Expression(key)
    return expression.params(table, ConditionExpression=expression.present(guard))


def delete_params(table: str, write: Delete) -> Params:
    expression = Expression(write.key)
    return expression.params(table, ConditionExpression=expression.absent_or(write.guard))


def _ttl(key: AnyKey, expires_at: float) -> Attribute:
    """Returns the expiry in whole seconds, rounded up: DynamoDB ignores fractions."""
    return {"N": str(ceil(expires_at + EXPIRING[type(key)]))}
