"""Reruns: over all that was accepted, whatever had come of it (I35)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.model import RunStatus
from conveyor.simulation.history import Call
from conveyor.simulation.watcher import Moment


def a_rerun_has_every_line(moment: Moment) -> Iterator[str]:
    """I35: each run of a job that has completed has as many tasks as the job was promised."""
    for promise in moment.history.promises.values():
        for run in moment.after.runs_by_job.get(promise.job_id, []):
            count = len(moment.after.tasks_by_run.get(run.run_id, []))
            if run.status is RunStatus.COMPLETED and count < promise.lines_count:
                yield f"run {run.run_id}: {promise.lines_count} lines promised, {count} tasks"


def what_was_accepted_can_be_run_again(moment: Moment, call: Call) -> Iterator[str]:
    """I35: nobody who asks for all lines of a job that has some is told that there are none."""
    if not call.path.endswith("/rerun") or b"no_matching_tasks" not in call.answer:
        return
    promise = moment.history.promises.get(call.path.split("/")[-2])
    if promise is not None and promise.lines_count:
        yield f"call {call.number} found none of {promise.lines_count} lines of {promise.job_id}"
