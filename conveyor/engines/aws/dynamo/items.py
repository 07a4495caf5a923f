"""Items: the mapping between rows and DynamoDB's attributes, derived from the types (SPEC 5.10).

Texts and enums are S, numbers and instants N, booleans BOOL, anything composite JSON in an S. What
is empty by default and empty in the row is left out: a task stays below one write unit.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

Attribute = dict[str, Any]
Item = dict[str, Attribute]

_PLAIN = (str, int, float, bool)
_decode_json = msgspec.json.decode


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """How the rows of one type are kept."""

    row_type: type[msgspec.Struct]
    defaults: Mapping[str, Any]
    composite: frozenset[str]

    def to_item(self, row: msgspec.Struct) -> Item:
        fields = zip(self.row_type.__struct_fields__, msgspec.structs.astuple(row), strict=True)
        return {name: to_attribute(value) for name, value in fields if not self.omits(name, value)}

    def from_item(self, item: Item) -> Any:
        """Attributes that are no fields, such as those of indexes, are passed over."""
        values: dict[str, Any] = {}
        for name in self.row_type.__struct_fields__:
            if name in item:
                value = from_attribute(item[name])
                is_json = name in self.composite and value is not None
                values[name] = _decode_json(value) if is_json else value
        return msgspec.convert(values, self.row_type)

    def omits(self, name: str, value: Any) -> bool:
        """An attribute that is not there means this value."""
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
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int | float):
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
