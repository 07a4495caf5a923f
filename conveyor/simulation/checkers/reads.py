"""Reads: pages (SPEC.md 6: I37 to I40)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.simulation.watcher import Moment


def pages_show_each_task_once(moment: Moment) -> Iterator[str]:
    """I37: all pages of a run that has ended show each of its tasks once, in the order of ids."""
    for run_id, shown in moment.history.paged_runs:
        run = moment.after.run_by_id.get(run_id)
        if run is None or run.status in RUN_LIVE:
            continue
        ids = sorted(task.task_id for task in moment.after.tasks_by_run.get(run_id, []))
        if shown != ids:
            yield f"run {run_id} has {len(ids)} tasks, its pages showed {len(shown)}"
