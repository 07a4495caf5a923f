"""Checks failure reasons: a task fails because of its site, the gateway or its input (I54)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conveyor.domain.changes import TaskKey
from conveyor.domain.model import Problem, TaskStatus
from conveyor.simulation.invariant_monitor import StateChange

_OWN_RESOURCES = re.compile(
    r"\b(storage|bucket|disk|room|database|store|queue|lease|redis|coordinator|descriptors?"
    r"|resources?|threads?|memory|ports)\b"
)


def no_failure_names_our_resources(state: StateChange) -> Iterator[str]:
    """I54: no task fails because of storage, descriptors, memory or another resource of the
    service."""
    for change in state.changed(TaskKey):
        task = change.new
        if task is None or task.status is not TaskStatus.FAILED or task.problem is None:
            continue
        if named := _OWN_RESOURCES.search(_text_of(task.problem)):
            yield f"task {task.run_id}/{task.task_id} failed because of own resource {named[0]}"


def _text_of(problem: Problem) -> str:
    words = (problem.code.replace("_", " "), problem.title, problem.detail or "")
    return " ".join(words).lower()
