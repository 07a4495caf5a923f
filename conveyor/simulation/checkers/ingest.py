"""Checks ingestion: task ids, insert-only rows and totals (SPEC.md 6: I8, I9, I11)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.changes import BatchKey, RunKey, TaskKey
from conveyor.domain.model import BatchStatus, Task
from conveyor.simulation.invariant_monitor import StateChange

_PINNED = ("url", "index", "batch_id", "shard", "method", "external_id", "params", "created_at")


def a_line_is_one_task(state: StateChange) -> Iterator[str]:
    """I8: no two tasks of a run are the same line of the same list."""
    for run_id in sorted({c.new.run_id for c in state.changed(TaskKey) if c.old is None}):
        seen: dict[tuple[str, int], str] = {}
        for task in state.after.tasks_by_run.get(run_id, []):
            line = (task.batch_id, task.index)
            if line in seen:
                yield f"run {run_id}: line {line} is {seen[line]} and {task.task_id}"
            seen[line] = task.task_id


def ingest_only_inserts(state: StateChange) -> Iterator[str]:
    """I9: the input of a task never changes, and no task starts over."""
    for change in state.changed(TaskKey):
        old, new = change.old, change.new
        if old is None or new is None:
            continue
        for name in _PINNED:
            if getattr(old, name) != getattr(new, name):
                yield f"task {new.run_id}/{new.task_id}: {name} changed"
        if _has_started_over(old, new):
            yield f"task {new.run_id}/{new.task_id} started over"


def _has_started_over(old: Task, new: Task) -> bool:
    return new.claim < old.claim or (old.claim > 0 and new.claim == 0)


def totals_are_sums_of_sealed_lists(state: StateChange) -> Iterator[str]:
    """I11: the total of a run is the sum over its sealed lists."""
    run_ids = {(c.new or c.old).run_id for k in (RunKey, BatchKey) for c in state.changed(k)}
    for run_id in sorted(run_ids):
        run = state.after.run_by_id.get(run_id)
        if run is None or state.is_deleted(run):
            continue
        batches = state.after.batches_by_run.get(run_id, [])
        sealed = sum(batch.total for batch in batches if batch.status is BatchStatus.SEALED)
        if run.total != sealed:
            yield f"run {run_id}: total is {run.total}, its sealed lists have {sealed}"
        open_count = sum(batch.status is BatchStatus.OPEN for batch in batches)
        if run.open_batches < open_count:
            yield f"run {run_id} has {open_count} open lists and counts {run.open_batches}"


def a_sealed_list_has_all_its_rows(state: StateChange) -> Iterator[str]:
    """I11: a list is sealed only when each of its lines has a row."""
    for change in state.changed(BatchKey):
        batch = change.new
        if batch is None or batch.status is not BatchStatus.SEALED:
            continue
        run = state.after.run_by_id.get(batch.run_id)
        if run is None or state.is_deleted(run):
            continue
        tasks = state.after.tasks_by_run.get(batch.run_id, [])
        count = sum(task.batch_id == batch.batch_id for task in tasks)
        if count != batch.total and run.rerun_of is None:
            yield f"list {batch.batch_id} of {batch.run_id}: {batch.total} sealed, {count} rows"
