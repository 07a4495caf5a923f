"""Damage: reads a stored task of which some fields cannot be decoded
(docs/storage.md, Damaged rows).

Every task must be counted, even if its row is damaged. A damaged row is read field by field:
readable fields are kept, and placeholders replace the others. Such a task is never fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from conveyor.domain import errors
from conveyor.domain.model import Task, TaskStatus

# Without these fields, the task cannot be identified.
_IDENTITY = frozenset({"run_id", "task_id", "shard"})
_STAND_INS = {"batch_id": "", "index": 0, "url": "", "created_at": 0.0, "updated_at": 0.0}


class DamagedTask(Task, frozen=True):
    """A task with placeholders in the fields that `damaged` names."""

    damaged: tuple[str, ...] = ()


def salvage_task(readable: Mapping[str, Any], damaged: Collection[str]) -> DamagedTask | None:
    """Returns the readable part of the task, or None if the task cannot be identified.

    `readable` has the decoded fields. `damaged` has the names of the fields that are missing or
    cannot be decoded.
    """
    if any(name not in readable for name in _IDENTITY):
        return None
    values = {**_STAND_INS, "status": _status_of(readable, damaged), **readable}
    if "result" in damaged and values.get("problem") is None:
        values["problem"] = errors.row_damaged(damaged)
    return DamagedTask(**values, damaged=tuple(sorted(damaged)))


def _status_of(readable: Mapping[str, Any], damaged: Collection[str]) -> TaskStatus:
    """Infers the status: only a settle writes an outcome, and only a claim writes its end."""

    def is_there(name: str) -> bool:
        return name in damaged or readable.get(name) is not None

    if is_there("result"):
        return TaskStatus.SUCCESSFUL
    if is_there("reason") or is_there("problem"):
        return TaskStatus.FAILED
    return TaskStatus.PROCESSING if readable.get("claim_until") else TaskStatus.PENDING


def without_marks(task: Task) -> Task:
    """Returns a task that can be stored. The placeholders become its values."""
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
