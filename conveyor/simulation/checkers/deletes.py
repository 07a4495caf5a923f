"""Checks deletion and stopping (SPEC.md 6: I32 to I36)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import (
    BatchKey,
    EventKey,
    ExportKey,
    JobKey,
    NoticeKey,
    RecordKey,
    RunKey,
    SampleKey,
    ScheduleKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.model import JobStatus
from conveyor.simulation.backends.storage_dump import CONTROL, MARK, MESSAGE, QUEUE
from conveyor.simulation.client_history import Call, Fetch
from conveyor.simulation.invariant_monitor import StateChange

_OF_A_RUN = (BatchKey, StatsKey, ExportKey, NoticeKey, EventKey, SampleKey)
_OF_A_JOB = (RunKey, ScheduleKey, *_OF_A_RUN)
_QUEUES_AND_MARKS = frozenset({QUEUE, MESSAGE, MARK})
# The names of coordination entries that say which job a run belongs to end like this.
_OWNER_ENDINGS = ("/:job", " job")

# A worker that was paused or slow when a run was stopped learns of the stop with its next
# heartbeat.
_STOP_NOTICED_S = limits.HEARTBEAT_S + limits.CLAIM_TTL_S


def a_deleted_job_is_not_found(state: StateChange, call: Call) -> Iterator[str]:
    """I32: after a delete is answered, every read of the job is answered 404."""
    if call.method != "GET" or not call.is_accepted:
        return
    for job_id, deleted_at in state.history.deleted_jobs.items():
        if f"/{job_id}" in call.path and call.sent_at > deleted_at:
            yield f"call {call.number} read job {job_id}, which was deleted at {deleted_at:.3f}"


def nothing_is_left_of_a_deleted_job(state: StateChange) -> Iterator[str]:
    """I33: no row, body, list or export of a deleted job is left; its tombstone contains none of
    its data."""
    after, deleted = state.after, _deleted_jobs(state)
    for kind in _OF_A_JOB:
        for row in after.rows[kind].values():
            if row.job_id in deleted:
                yield f"{type(row).__name__} of deleted job {row.job_id} is left"
    for task in after.tasks.values():
        if task.run_id not in after.run_by_id:
            yield f"task {task.run_id}/{task.task_id} belongs to no run"
    for key in state.bodies():
        if any(job_id in key for job_id in deleted):
            yield f"the body {key} of a deleted job is left"


def nothing_refers_to_what_was_deleted(state: StateChange) -> Iterator[str]:
    """I33: no message and no coordination entry names a deleted job, and every queue belongs to an
    existing run. Two kinds of entries may remain, because they hold only ids: which job a run
    belongs to, for a day, and notifications in the control queue that no process received."""
    deleted = [job_id.encode() for job_id in sorted(_deleted_jobs(state))]
    for item in state.stored_items():
        is_kept = item.name.endswith(_OWNER_ENDINGS) or item.name.startswith(CONTROL)
        if item.location not in _QUEUES_AND_MARKS or is_kept:
            continue
        text = item.name.encode() + b" " + item.content
        if any(job_id in text for job_id in deleted):
            yield f"the {item.location} {item.name} of a deleted job is left"
        run = state.after.run_by_id.get(item.name)
        if item.location == QUEUE and (run is None or state.is_deleted(run)):
            yield f"the queue of run {item.name} is left, its run is deleted"


def nothing_is_left_of_a_deleted_run(state: StateChange) -> Iterator[str]:
    """I33: no list, counter, export, event, task or body of a deleted run is left."""
    deleted = {
        call.route.rpartition("/")[2]
        for call in state.history.calls
        if call.method == "DELETE" and call.is_accepted and "/runs/" in call.route
    }
    for kind in (*_OF_A_RUN, TaskKey):
        for row in state.after.rows[kind].values():
            if row.run_id in deleted:
                yield f"{type(row).__name__} of deleted run {row.run_id} is left"
    for key in state.bodies():
        if any(run_id in key for run_id in deleted):
            yield f"the body {key} of a deleted run is left"


def _deleted_jobs(state: StateChange) -> set[str]:
    jobs = state.after.jobs
    deleted = {str(job.job_id) for job in jobs.values() if job.status is JobStatus.DELETED}
    return deleted | {job_id for job_id in state.history.deleted_jobs if (job_id,) not in jobs}


def no_row_appears_under_a_deleted_job(state: StateChange) -> Iterator[str]:
    """I34: no write creates a row under a deleted job. Exception: on engines that write rows before
    they count them, an ingest step that had begun may still write tasks. They are not counted, and
    the second pass of the deletion removes them."""
    dead = {job.job_id for job in state.before.jobs.values() if job.status is JobStatus.DELETED}
    if not dead:
        return
    others = {JobKey, RecordKey, TaskKey} if state.rows_come_first else {JobKey, RecordKey}
    for change in state.changes:
        if change.old is not None or change.kind in others:
            continue
        if change.kind is TaskKey:
            run = state.before.run_by_id.get(change.new.run_id)
            job_id = run.job_id if run is not None else None
        else:
            job_id = getattr(change.new, "job_id", None)
        if job_id in dead and state.has_half_written_change(job_id):
            continue
        if job_id in dead and change.kind in {*_OF_A_JOB, TaskKey}:
            yield f"a {type(change.new).__name__} appeared under deleted job {job_id}"


def a_stopped_run_is_left_alone(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I36: no fetch starts for a run that was stopped a while ago."""
    stopped_at = state.history.stopped_runs.get(fetch.run_id)
    if stopped_at is not None and fetch.started_at > stopped_at + _STOP_NOTICED_S:
        yield f"{fetch.process} fetches for run {fetch.run_id}, stopped at {stopped_at:.3f}"
