"""What the System page shows of the process: its actors, slots and engine calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from actors.runtime import Node

_ENGINE = "conveyor_engine_"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemView:
    """`tree` returns the actors of this process, if it has any besides the server."""

    engine: str = ""
    tree: Callable[[], Node] | None = None


@dataclass(frozen=True, slots=True)
class TreeLine:
    """One actor of the tree with its depth."""

    depth: int
    node: Node


def tree_lines(node: Node, depth: int = 0) -> Iterator[TreeLine]:
    yield TreeLine(depth, node)
    for child in node.children:
        yield from tree_lines(child, depth + 1)


def disk(registry: CollectorRegistry) -> dict[str, float] | None:
    """The free bytes and the size of the disk of the data directory, if this process has one."""
    free, size = (
        registry.get_sample_value(f"conveyor_disk_{name}_bytes") for name in ("free", "size")
    )
    return {"free": free or 0.0, "size": size} if size else None


def engine_calls(registry: CollectorRegistry) -> dict[str, Any]:
    """The calls of a shared engine by name, and their price; empty for an embedded engine."""
    calls: dict[str, float] = {}
    price = None
    for family in registry.collect():
        if family.name == f"{_ENGINE}calls":
            calls = {
                sample.labels["call"]: sample.value
                for sample in family.samples
                if sample.name.endswith("_total")
            }
        elif family.name == f"{_ENGINE}list_price_dollars":
            price = next((sample.value for sample in family.samples), None)
    return {"calls": calls, "price": price}
