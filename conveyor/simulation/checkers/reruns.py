"""Reruns: over all that was accepted, whatever had come of it (I35)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.model import RunStatus
from conveyor.simulation.watcher import Moment


def a_rerun_has_every_line(moment: Moment) -> Iterator[str]:
    """I35: each run of a job that has completed has as many tasks as the job was promised."""
    for promise in moment.history.promises.values():
        for run in moment.after.runs_by_job.get(promise.job_id, []):
            count = len(moment.after.tasks_by_run.get(run.run_id, []))
            if run.status is RunStatus.COMPLETED and count < promise.lines_count:
                yield f"run {run.run_id}: {promise.lines_count} lines promised, {count} tasks"
