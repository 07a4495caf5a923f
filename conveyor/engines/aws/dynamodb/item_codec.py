"""Item codec: converts rows to DynamoDB's attributes and back, derived from the types
(docs/storage.md, DynamoDB table).

Texts and enums are S, numbers and instants N, booleans BOOL, and composite values JSON in an S. A
field that is empty and empty by default is omitted, so that a task stays below one write unit.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

from conveyor.domain.damage import UNREADABLE, salvage_task
from conveyor.domain.model import Task
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
        rest = [each for each in get_args(hint) if each is not types.NoneType]
        return len(rest) == 1 and _is_plain(rest[0])
    if isinstance(hint, NewType):
        return _is_plain(hint.__supertype__)
    return hint in _PLAIN or (isinstance(hint, type) and issubclass(hint, enum.StrEnum))
