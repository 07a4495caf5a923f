"""Checks counters, totals and the lifecycles of runs and jobs (SPEC.md 6: I21 to I28)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from conveyor.domain import limits
from conveyor.domain.changes import (
    BatchKey,
    CrossingKey,
    JobKey,
    RunKey,
    SampleKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL, accepts_settles
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    JobStatus,
    RowsOf,
    Run,
    RunStatus,
    ShardCounters,
    Task,
    TaskStatus,
    Totals,
)
from conveyor.domain.queries import sum_stats
from conveyor.domain.run.series import make_series
from conveyor.simulation.invariant_monitor import StateChange

_ORDER = {JobStatus.OPEN: 0, JobStatus.CLOSED: 1, JobStatus.DELETED: 2}
_GROWING = ("admitted", "done", "successful", "failed", "credits", "cost_micros")


def touched_runs(state: StateChange) -> list[Run]:
    """The existing runs of which a row changed. Deleted runs are left out: their rows are removed
    one by one."""
    run_ids = {
        (change.new or change.old).run_id
        for kind in (RunKey, StatsKey, TaskKey, BatchKey)
        for change in state.changed(kind)
    }
    runs = [state.after.run_by_id.get(run_id) for run_id in sorted(run_ids)]
    return [run for run in runs if run is not None and not state.is_deleted(run)]


def counters_equal_rows(state: StateChange) -> Iterator[str]:
    """I21: after every write the counters of each run equal what its rows say. Admitted and
    retrying tasks are compared per shard, ended tasks as a sum over all shards (SPEC.md 2.3)."""
    for run in touched_runs(state):
        under_way = _under_way(state, run)
        tasks = state.after.tasks_by_run.get(run.run_id, [])
        by_shard: dict[int, list[Task]] = {}
        for task in tasks:
            by_shard.setdefault(task.shard, []).append(task)
        rows = [*state.after.stats_by_run.get(run.run_id, [])]
        if rows:
            yield from _compare(f"run {run.run_id}", sum_stats(rows), tasks, under_way, _ENDED)
        for stats in rows:
            name = f"run {run.run_id} shard {stats.shard}"
            in_shard = by_shard.pop(stats.shard, [])
            yield from _compare(name, stats, in_shard, under_way, _OF_SHARD)
        for shard, tasks in sorted(by_shard.items()):
            yield f"run {run.run_id} has {len(tasks)} tasks in shard {shard} without counters"


def _under_way(state: StateChange, run: Run) -> list[Batch]:
    """The lists that are being ingested, on engines that write rows before they count them. Tasks
    of such a list behind its checkpoint may be counted or not."""
    batches = state.after.batches_by_run.get(run.run_id, []) if state.rows_come_first else []
    return [batch for batch in batches if batch.status is not BatchStatus.SEALED]


def _is_behind(batch: Batch, task: Task) -> bool:
    """Whether the task is behind the checkpoint of the list. A rerun copies tasks in the order of
    their ids, and its tasks name the list that they first came with."""
    if isinstance(batch.source, RowsOf):
        is_its = batch.source.batch_id in {None, task.batch_id}
        return is_its and task.task_id > (batch.cursor or "")
    return task.batch_id == batch.batch_id and task.index >= batch.done


def _compare(
    label: str,
    counters: ShardCounters | Totals,
    tasks: Sequence[Task],
    under_way: list[Batch],
    counted: Mapping[str, Callable[[Task], bool]],
) -> Iterator[str]:
    sure = [task for task in tasks if not any(_is_behind(batch, task) for batch in under_way)]
    for name, counts in counted.items():
        count = getattr(counters, name)
        least, most = sum(map(counts, sure)), sum(map(counts, tasks))
        if not least <= count <= most:
            said = f"{least}" if least == most else f"{least} to {most}"
            yield f"{label}: {name} is {count}, by its rows {said}"


_OF_SHARD: Mapping[str, Callable[[Task], bool]] = {
    "admitted": lambda task: True,
    "retrying": lambda task: task.status is TaskStatus.PENDING and task.attempts > 0,
}
# A worker may count the tasks that it ends in any counter row of their run.
_ENDED: Mapping[str, Callable[[Task], bool]] = {
    "done": lambda task: task.status in TASK_TERMINAL,
    "successful": lambda task: task.status is TaskStatus.SUCCESSFUL,
    "failed": lambda task: task.status is TaskStatus.FAILED,
}


def counters_never_fall(state: StateChange) -> Iterator[str]:
    """I22: counters never fall, and never exceed the number of admitted tasks."""
    for change in state.changed(StatsKey):
        old, new = change.old, change.new
        if new is None:
            continue
        totals = sum_stats([*state.after.stats_by_run.get(new.run_id, ())])
        # The counter rows of a deleted run are removed one by one, so their sums mean nothing.
        run = state.after.run_by_id.get(new.run_id)
        if not totals.done <= totals.admitted and run is not None and not state.is_deleted(run):
            yield f"run {new.run_id}: {totals.done} done, {totals.admitted} admitted"
        for name in _GROWING if old is not None else ():
            if getattr(new, name) < getattr(old, name):
                yield f"run {new.run_id} shard {new.shard}: {name} fell"


def the_series_adds_up_to_the_counters(state: StateChange) -> Iterator[str]:
    """I67: no sample exceeds the counters of its run, and the time series adds up to them."""
    for run_id in sorted({change.new.run_id for change in state.changed(SampleKey) if change.new}):
        run = state.after.run_by_id.get(run_id)
        if run is None or state.is_deleted(run):
            continue
        totals = sum_stats([*state.after.stats_by_run.get(run_id, ())])
        rows = [row for row in state.after.rows[SampleKey].values() if row.run_id == run_id]
        samples = sorted(rows, key=lambda row: row.minute)
        ended = [row.successful + sum(row.reasons.values()) for row in samples]
        if max(ended, default=0) > totals.done:
            yield f"run {run_id}: a sample has {max(ended)} ended tasks, its counters {totals.done}"
        if len(samples) > limits.SAMPLES_MAX:
            yield f"run {run_id} has {len(samples)} samples"
        buckets = make_series(run, samples, totals, now=max(row.at for row in samples) + 1)
        for name in ("successful", "failed", "stored_bytes", "credits", "cost_micros"):
            added = sum(getattr(bucket, name) for bucket in buckets)
            if added != getattr(totals, name):
                yield f"run {run_id}: {name} in the series {added}, counted {getattr(totals, name)}"


def a_completed_run_is_complete(state: StateChange) -> Iterator[str]:
    """I23: a completed run is closed, has no list that is being ingested, and all its tasks have
    ended."""
    for change in state.changed(RunKey):
        run = change.new
        if run is None or run.status is not RunStatus.COMPLETED:
            continue
        if change.old is not None and change.old.status is RunStatus.COMPLETED:
            # It was checked when it completed; the rows of a deleted job are removed one by one.
            continue
        tasks = state.after.tasks_by_run.get(run.run_id, [])
        unfinished = [task.task_id for task in tasks if task.status not in TASK_TERMINAL]
        if unfinished:
            yield f"run {run.run_id} completed with unfinished tasks: {unfinished[:3]}"
        if run.open_batches or not run.last_batch_received:
            yield f"run {run.run_id} completed with lists that are not sealed"
        done = sum(row.done for row in state.after.stats_by_run.get(run.run_id, []))
        if done != run.total or len(tasks) != run.total:
            yield f"run {run.run_id} completed: total {run.total}, done {done}, rows {len(tasks)}"


def an_ended_run_never_changes(state: StateChange) -> Iterator[str]:
    """I24: a terminal status never changes, and no result, counter or total of an ended run
    changes."""
    for change in state.changed(RunKey):
        old, new = change.old, change.new
        if old is None or old.status in RUN_LIVE or new is None:
            continue
        if new.status not in {old.status, RunStatus.DELETED}:
            yield f"run {old.run_id} went from {old.status} to {new.status}"
        if new.total != old.total:
            yield f"run {old.run_id} ended, and its total changed from {old.total} to {new.total}"
    for kind in (TaskKey, StatsKey):
        for change in state.changed(kind):
            # An ingest step that was overtaken by the end of the run may leave rows, which are not
            # counted.
            is_late = change.old is None and state.rows_come_first
            if (
                change.new is not None
                and not is_late
                and not _was_left_unfinished(change.old, change.new)
            ):
                yield from _changed_after_the_end(state, change.old, change.new)


def _was_left_unfinished(old: Task | ShardCounters | None, new: Task | ShardCounters) -> bool:
    """Whether the task was unfinished when its run ended: a claim that was already being written
    may still change it."""
    return (
        isinstance(old, Task)
        and isinstance(new, Task)
        and new.status not in TASK_TERMINAL
        and new.attempts == old.attempts
    )


def _changed_after_the_end(
    state: StateChange, old: Task | ShardCounters | None, row: Task | ShardCounters
) -> Iterator[str]:
    before = state.before.run_by_id.get(row.run_id)
    if before is None or before.status in RUN_LIVE or state.has_half_written_change(before.job_id):
        return
    if before.status is not RunStatus.DELETED or old is None:
        yield f"run {row.run_id} is {before.status}, and {type(row).__name__} changed"


def nothing_settles_after_a_stop(state: StateChange) -> Iterator[str]:
    """I24: once a stop or delete is recorded, no task of the run ends."""
    for change in state.changed(TaskKey):
        old, new = change.old, change.new
        if old is None or new is None or new.status not in TASK_TERMINAL:
            continue
        run = state.before.run_by_id.get(new.run_id)
        is_over = run is None or not accepts_settles(run)
        if run is not None and state.has_half_written_change(run.job_id):
            continue
        if is_over and old.status not in TASK_TERMINAL:
            yield f"task {new.run_id}/{new.task_id} ended after its run was stopped"


def at_most_one_live_run(state: StateChange) -> Iterator[str]:
    """I25: a job has at most one run that has not ended, and names it as its active run."""
    for job_id in sorted({(c.new or c.old).job_id for c in state.changed(RunKey)}):
        live = [r for r in state.after.runs_by_job.get(job_id, []) if r.status in RUN_LIVE]
        if len(live) > 1:
            yield f"job {job_id} has {len(live)} live runs"
        job = state.after.jobs.get((job_id,))
        if live and job is not None and job.active_run_id != live[0].run_id:
            yield f"job {job_id} does not call its live run active"


def jobs_only_go_forward(state: StateChange) -> Iterator[str]:
    """I26: a job goes from open to closed to deleted and never back; a closed job admits no
    list."""
    for change in state.changed(JobKey):
        old, new = change.old, change.new
        if old is not None and new is not None and _ORDER[new.status] < _ORDER[old.status]:
            yield f"job {new.job_id} went from {old.status} to {new.status}"
    for change in state.changed(BatchKey):
        run = state.before.run_by_id.get((change.new or change.old).run_id)
        if change.old is None and run is not None and run.last_batch_received:
            yield f"run {run.run_id} admitted a list after its last one"


def no_change_stays_half_written(state: StateChange) -> Iterator[str]:
    """I27: a change that spans two stores is written to both in the end, and its record is
    removed."""
    for crossing in state.after.rows[CrossingKey].values():
        yield f"a change of job {crossing.job_id} is only half written"
