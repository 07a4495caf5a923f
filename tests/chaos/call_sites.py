"""Lists every call site of the engines' ports, read from the sources.

A site has the name by which a process knows it at run time (`site_program.site_of`): the port's
method and the product's function that calls it. A call in a lambda or comprehension belongs to the
function that contains it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import actors
import conveyor
from conveyor.ports.blobs import Blobs
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store

PORTS = {"store": Store, "queue": Queue, "blobs": Blobs, "coordinator": Coordinator}
CALLS = {
    f"{port}.{name}"
    for port, protocol in PORTS.items()
    for name in vars(protocol)
    if not name.startswith("_")
}
_ENV = "usecases.context"


def call_sites() -> set[str]:
    """Returns the call sites of an API and a worker. Commands only read."""
    roots = [Path(actors.__file__).parent]
    roots += [Path(conveyor.__file__).parent / name for name in ("usecases", "api")]
    sites: set[str] = set()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            base = root.parent
            module = ".".join(path.relative_to(base).with_suffix("").parts)
            if module != _ENV:
                sites.update(_sites_in(ast.parse(path.read_text()), module))
    return sites


def _sites_in(tree: ast.AST, inside: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _sites_in(node, f"{inside}.{node.name}")
        else:
            if isinstance(node, ast.Attribute) and (call := _call_of(node)):
                yield f"{call}@{inside}"
            yield from _sites_in(node, inside)


def _call_of(node: ast.Attribute) -> str | None:
    """`env.store.read` is `store.read`; `env.commit`, with or without events, is `store.commit`."""
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    if name in {"env", "_env"} and node.attr in {"commit", "commit_with_events"}:
        return "store.commit"
    call = f"{name.removeprefix('_')}.{node.attr}"
    return call if call in CALLS else None
