"""Checks worlds without internal faults: nothing there happens twice or late, unless a line killed
a process."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.changes import ExportKey, RunKey
from conveyor.domain.model import RunStatus
from conveyor.simulation.client_history import Fetch
from conveyor.simulation.invariant_monitor import StateChange

SOON_S = 5.0
"""Shorter than the period of the sweeper, which would repair a late end."""


def no_page_is_fetched_twice_at_once(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I17: while a task is being fetched, no other worker fetches it."""
    if not state.history.is_fault_free:
        return
    for other in state.history.fetches:
        is_same = (other.run_id, other.task_id) == (fetch.run_id, fetch.task_id)
        if is_same and other is not fetch and other.ended_at is None:
            yield f"task {fetch.run_id}/{fetch.task_id} is fetched by claim {other.claim} as well"


def no_export_is_made_twice(state: StateChange) -> Iterator[str]:
    """I40: only one of several processes makes an export."""
    for change in state.changed(ExportKey) if state.history.is_fault_free else ():
        if change.new is not None and change.new.epoch > 1:
            yield f"export {change.new.export_id} was started {change.new.epoch} times"


def the_last_task_completes_the_run(state: StateChange) -> Iterator[str]:
    """I27: the last task of a closed run completes the run; the sweeper is not needed."""
    if not state.history.is_fault_free or state.history.kills_count:
        return
    for change in state.changed(RunKey):
        old, new = change.old, change.new
        if old is None or new is None or new.status is not RunStatus.COMPLETED:
            continue
        tasks = state.after.tasks_by_run.get(new.run_id, [])
        was_all_in = old.last_batch_received and not old.open_batches
        if old.status is new.status or not was_all_in or not tasks or new.ended_at is None:
            continue
        # The run also changes when its last list is sealed and when it is closed.
        since_s = new.ended_at - max(old.updated_at, *(task.updated_at for task in tasks))
        if since_s > SOON_S:
            yield f"run {new.run_id} completed {since_s:.1f} s after its last task"
