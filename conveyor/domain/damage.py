"""Damage: what a stored task still says when some of its fields cannot be decoded
(docs/storage.md, Damaged rows).

A task must be counted whatever its row has become, so a damaged one is read field by field: what
can be decoded is kept, and stand-ins take the places of the rest. It is never fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from conveyor.domain import problems
from conveyor.domain.model import Task, TaskStatus

# Without these nothing tells which task it is.
_IDENTITY = frozenset({"run_id", "task_id", "shard"})
_STAND_INS = {"batch_id": "", "index": 0, "url": "", "created_at": 0.0, "updated_at": 0.0}


class DamagedTask(Task, frozen=True):
    """A task with stand-ins in the fields that `damaged` names."""

    damaged: tuple[str, ...] = ()


def salvage_task(readable: Mapping[str, Any], damaged: Collection[str]) -> DamagedTask | None:
    """The task as far as its row can be decoded; None where it cannot even be told which it is.

    `readable` holds the fields that could be decoded, `damaged` the names of those that are there
    and could not be, or that are missing.
    """
    if any(name not in readable for name in _IDENTITY):
        return None
    values = {**_STAND_INS, "status": _status_of(readable, damaged), **readable}
    if "result" in damaged and values.get("problem") is None:
        values["problem"] = problems.row_damaged(damaged)
    return DamagedTask(**values, damaged=tuple(sorted(damaged)))


def _status_of(readable: Mapping[str, Any], damaged: Collection[str]) -> TaskStatus:
    """What the other fields say: only a settle writes an outcome, and only a claim an end of it."""

    def is_there(name: str) -> bool:
        return name in damaged or readable.get(name) is not None

    if is_there("result"):
        return TaskStatus.SUCCESSFUL
    if is_there("reason") or is_there("problem"):
        return TaskStatus.FAILED
    return TaskStatus.PROCESSING if readable.get("claim_until") else TaskStatus.PENDING


def without_marks(task: Task) -> Task:
    """The task as it can be stored: the stand-ins are its values from now on."""
    if not isinstance(task, DamagedTask):
        return task
    return Task(**{name: getattr(task, name) for name in Task.__struct_fields__})


UNREADABLE = (
    msgspec.MsgspecError,
    KeyError,
    TypeError,
    ValueError,  # A text that is no UTF-8 among them.
    RecursionError,
)
"""What decoders raise over stored values that they cannot make sense of."""
