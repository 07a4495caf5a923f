"""What conveyor/api/server/reference.json has to contain: the doc comments of the types in the
OpenAPI document, and the responses to its examples."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import msgspec

from conveyor.api.server.app import ROUTES
from conveyor.api.server.openapi import types_of
from tests.api import examples
from tests.tidy import doc_comments


def make_reference() -> str:
    reference = {"types": descriptions(), **examples.record()}
    return json.dumps(reference, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def descriptions() -> dict[str, dict[str, str]]:
    """The words for each field of each type, or for each value of an enumeration."""
    texts: dict[str, dict[str, str]] = {}
    pending: list[Any] = list(msgspec.inspect.multi_type_info(types_of(ROUTES)))
    while pending:
        node = pending.pop()
        if isinstance(node, msgspec.inspect.StructType) and node.cls.__name__ not in texts:
            texts[node.cls.__name__] = doc_comments.of_class(node.cls)
            pending += [field.type for field in node.fields]
        if isinstance(node, msgspec.inspect.EnumType):
            texts[node.cls.__name__] = _values(node.cls)
        for name in ("types", "item_types"):
            pending += getattr(node, name, ())
        for name in ("item_type", "key_type", "value_type", "type"):
            pending += [getattr(node, name)] if hasattr(node, name) else []
    return dict(sorted(texts.items()))


def _values(kind: type[Enum]) -> dict[str, str]:
    words = doc_comments.of_class(kind)
    return {member.value: words[member.name] for member in kind}
