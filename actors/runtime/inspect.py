"""Inspection: a live supervision tree as a frozen value, as JSON and as text.

It only reads the records of the supervisors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import trio

from actors.runtime.child import ChildState, State, SupervisorInfo

# States without an uptime: nothing of the child runs.
DOWN = frozenset(
    {State.WAITING, State.BACKING_OFF, State.STOPPED, State.FINISHED, State.FAILED},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One child, or one supervisor with its children in start order."""

    name: str
    kind: str
    state: str
    restarts: int
    mailbox_depth: int | None
    mailbox_capacity: int | None
    uptime_s: float | None
    last_error: str | None
    children: tuple[Node, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tree(supervisor: SupervisorInfo) -> Node:
    """Returns what runs under a supervisor now. Call it from within Trio."""
    return Node(
        name=supervisor.name,
        kind=supervisor.kind,
        state=supervisor.state.value,
        restarts=0,
        mailbox_depth=None,
        mailbox_capacity=None,
        uptime_s=_uptime_s(supervisor.state, supervisor.started_at),
        last_error=None,
        children=_children_of(supervisor),
    )


def _children_of(supervisor: SupervisorInfo | None) -> tuple[Node, ...]:
    return () if supervisor is None else tuple(map(_node_from, supervisor.records()))


def _node_from(record: ChildState) -> Node:
    nested, mailbox, error = record.child.supervisor, record.child.mailbox, record.last_error
    mail = None if mailbox is None else mailbox.statistics()
    return Node(
        name=record.child.name,
        kind="actor" if nested is None else nested.kind,
        state=record.state.value,
        restarts=record.restart_count,
        mailbox_depth=None if mail is None else mail.depth,
        mailbox_capacity=None if mail is None else mail.capacity,
        uptime_s=_uptime_s(record.state, record.started_at),
        last_error=None if error is None else f"{type(error).__name__}: {error}",
        children=_children_of(nested),
    )


def _uptime_s(state: State, started_at: float | None) -> float | None:
    if started_at is None or state in DOWN:
        return None
    return trio.current_time() - started_at


def render(node: Node) -> str:
    """Returns the tree as text for a terminal, one line per node."""
    return "\n".join([_label(node), *_branches(node, "")])


def _branches(node: Node, indent: str) -> Iterator[str]:
    for index, child in enumerate(node.children):
        is_last = index == len(node.children) - 1
        yield f"{indent}{'└─ ' if is_last else '├─ '}{_label(child)}"
        yield from _branches(child, indent + ("   " if is_last else "│  "))


def _label(node: Node) -> str:
    words = [node.name, node.state]
    if node.kind != "actor":
        words.append(f"({node.kind})")
    if node.uptime_s is not None:
        words.append(f"up {node.uptime_s:.1f} s")
    if node.restarts:
        words.append(f"restarts {node.restarts}")
    if node.mailbox_capacity is not None:
        words.append(f"mail {node.mailbox_depth}/{node.mailbox_capacity}")
    if node.last_error is not None:
        words.append(f"last error {node.last_error}")
    return "  ".join(words)
