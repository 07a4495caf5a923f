"""Bodies: what a successful task names can still be read when all is over (I18)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from conveyor.domain.model import TaskStatus
from conveyor.simulation.watcher import Moment


def every_success_keeps_its_body(moment: Moment) -> Iterator[str]:
    """I18: whatever came after a success, its body is there as it was, also where a later run has
    inherited it. Results expire by the wall clock: what expires while it is days ahead is gone."""
    if moment.history.leaps_days:
        return
    for run in moment.after.runs.values():
        if moment.is_deleted(run):
            continue
        for task in moment.after.tasks_by_run.get(run.run_id, []):
            if task.status is not TaskStatus.SUCCESSFUL or task.result is None:
                continue
            body = moment.body(task.result.key)
            if body is None:
                yield f"task {run.run_id}/{task.task_id}: its body is gone"
            elif hashlib.sha256(body).hexdigest() != task.result.sha256:
                yield f"task {run.run_id}/{task.task_id}: its body was replaced"
