"""Claims: who may take a task, and whose end it was (I15, I17)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import TaskKey
from conveyor.domain.clocks import is_unreal
from conveyor.domain.model import Task, TaskStatus
from conveyor.simulation.watcher import Moment


def a_live_claim_is_left_alone(moment: Moment) -> Iterator[str]:
    """I17: who takes a task over finds the claim on it lapsed, by the clock of who takes it, or
    ending further ahead than a claim can."""
    for change in moment.changed(TaskKey):
        old, new = change.old, change.new
        if old is None or new is None or old.status is not TaskStatus.PROCESSING:
            continue
        taken_over = new.claim == old.claim + 1 and _ends(new) == _ends(old)
        if not taken_over or new.started_at is None:
            continue
        until, now = old.claim_until, new.started_at
        if now <= until and not is_unreal(until, now=now, ttl_s=limits.CLAIM_TTL_S):
            yield f"task {new.run_id}/{new.task_id} was taken from claim {old.claim}, which lived"


def an_end_is_that_of_its_claim(moment: Moment) -> Iterator[str]:
    """I15: the attempt that ended is the one that the current claim began."""
    for change in moment.changed(TaskKey):
        old, new = change.old, change.new
        if old is None or new is None or new.attempts == old.attempts:
            continue
        is_in_hand = new.status is TaskStatus.PROCESSING
        if not is_in_hand and new.history and new.history[-1].started_at != new.started_at:
            yield f"task {new.run_id}/{new.task_id} was ended under a claim before {new.claim}"


def _ends(task: Task) -> int:
    return task.attempts + task.handed_back
