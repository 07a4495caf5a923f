"""Checks that accepted jobs, lists and keys are kept (SPEC.md 6: I1 to I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import FIRST_BATCH
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL
from conveyor.domain.model import JobStatus, RunStatus
from conveyor.simulation.checkers.idempotency import is_in_force, is_same_key
from conveyor.simulation.client_history import Call
from conveyor.simulation.invariant_monitor import StateChange

_SUBMIT = "/v1/jobs"


def an_accepted_job_is_durable(state: StateChange, call: Call) -> Iterator[str]:
    """I1: when a submit or rerun is answered, its job, its run and a durable list exist."""
    makes_a_run = call.path == _SUBMIT or call.route.endswith("/rerun")
    if not (call.is_accepted and call.method == "POST" and makes_a_run):
        return
    answer = call.json
    if "job_id" not in answer:
        return  # A dry run creates nothing.
    job = state.after.jobs.get((answer["job_id"],))
    if job is None:
        yield f"call {call.number} was answered {call.status}, its job is missing"
        return
    latest = answer.get("latest_run")
    if latest is None or job.status is JobStatus.DELETED:
        return
    run = state.after.run_by_id.get(latest["run_id"])
    if run is None:
        # A repeated request gets the stored answer even after its run was deleted.
        if not _was_deleted(state, latest["run_id"]):
            yield f"call {call.number} was answered {call.status}, its run is missing"
    elif not run.open_batches and run.planned != run.total and run.status is not RunStatus.DELETED:
        yield f"run {run.run_id}: {run.planned} lines planned, {run.total} stored, no list open"


def an_accepted_list_is_durable(state: StateChange, call: Call) -> Iterator[str]:
    """I1: when an added list is answered, every list that was added to the job so far is stored
    with its number of lines."""
    if not (call.is_accepted and _is_list(call)):
        return
    job_id = call.route.split("/")[-2]
    job = state.after.jobs.get((job_id,))
    if job is None or job.status is JobStatus.DELETED:
        if not _was_deleted(state, job_id):
            yield f"call {call.number} was answered {call.status}, its job is missing"
        return
    if _was_deleted(state, f"{job_id}/runs/"):
        return
    added = {
        other_call.key: other_call
        for other_call in state.history.calls
        if _is_same_list(other_call, call)
    }
    expected = Counter(other_call.json["accepted_tasks"] for other_call in added.values())
    there = Counter(
        batch.total
        for run in state.after.runs_by_job.get(job_id, [])
        for batch in state.after.batches_by_run.get(run.run_id, [])
        if batch.batch_id != FIRST_BATCH
    )
    for lines_count in sorted((expected - there).elements()):
        yield f"job {job_id} lacks a list of {lines_count} lines that was added"


def _is_list(call: Call) -> bool:
    return call.method == "POST" and call.route.endswith("/tasks")


def _is_same_list(other_call: Call, call: Call) -> bool:
    """Whether both calls added a list to the same job, under any key."""
    return other_call.path == call.path and other_call.is_accepted and _is_list(other_call)


def _was_deleted(state: StateChange, part: str) -> bool:
    """Whether a client asked to delete something whose path contains this."""
    return any(call.method == "DELETE" and part in call.path for call in state.history.calls)


def no_task_is_lost(state: StateChange) -> Iterator[str]:
    """I2: every line of an accepted job is a task that has ended, unless the job was stopped or
    deleted."""
    for accepted in state.history.accepted_requests.values():
        job = state.after.jobs.get((accepted.job_id,))
        if job is None or job.status is JobStatus.DELETED or accepted.run_id is None:
            continue
        run = state.after.run_by_id.get(accepted.run_id)
        if run is None or run.status is not RunStatus.COMPLETED:
            continue
        tasks = state.after.tasks_by_run.get(run.run_id, [])
        # More tasks are allowed: a list whose answer was lost may have been admitted.
        if len(tasks) < accepted.lines_count:
            yield f"run {run.run_id}: {accepted.lines_count} lines accepted, {len(tasks)} tasks"
        for task in tasks:
            if task.status not in TASK_TERMINAL:
                yield f"task {run.run_id}/{task.task_id} never ended"


def an_accepted_job_completes_unless_stopped(state: StateChange) -> Iterator[str]:
    """I2: the first run of an accepted job is complete, unless a client stopped or deleted it."""
    for accepted in state.history.accepted_requests.values():
        job = state.after.jobs.get((accepted.job_id,))
        if accepted.run_id is None or (job is not None and job.status is JobStatus.DELETED):
            continue
        run = state.after.run_by_id.get(accepted.run_id)
        was_asked_for = any(
            accepted.job_id in call.path
            and (call.method == "DELETE" or call.route.endswith(("/stop", "/cancel")))
            for call in state.history.calls
        )
        if run is None:
            # If clocks differ by weeks, a run that ended by one clock has expired by another. That
            # it had ended is checked by `only_what_has_ended_expires` (seed 406).
            if not was_asked_for and not state.history.leaps_days:
                yield f"run {accepted.run_id} of job {accepted.job_id} is missing"
        elif accepted.lines_count >= limits.TASKS_MAX:
            # The job may have had more lines than TASKS_MAX, which is noticed only while its list
            # is ingested.
            continue
        elif run.status is RunStatus.STOPPED and not was_asked_for:
            yield f"run {run.run_id} was stopped, and no client asked for it: {run.stop_reason}"
        elif run.status is RunStatus.FAILED and not state.history.spent_count:
            yield f"run {run.run_id} failed, with credits left: {run.failure_reason}"


def only_what_has_ended_expires(state: StateChange) -> Iterator[str]:
    """I2: a run that no client asked to delete is removed only after it has ended."""
    for change in state.changed(RunKey):
        old, new = change.old, change.new
        is_removed = new is None or new.status is RunStatus.DELETED
        if old is None or old.status not in RUN_LIVE or not is_removed:
            continue
        if not _was_deleted(state, old.job_id):
            yield f"run {old.run_id} was removed while {old.status}, and no client asked for it"


def one_key_makes_one_thing(state: StateChange, call: Call) -> Iterator[str]:
    """I3, I4: all requests with one key and one body get the same answer, byte for byte. Records of
    keys expire by the wall clock, so this is not checked where it leaps by days."""
    if state.history.leaps_days or not _is_keyed_success(call):
        return
    for other in state.history.calls:
        if other is call or not _is_keyed_success(other):
            continue
        same = is_same_key(other, call) and is_in_force(other, call)
        is_repeat = same and other.body == call.body
        if is_repeat and (other.status, other.answer) != (call.status, call.answer):
            yield f"calls {other.number} and {call.number} have one key and two answers"


def a_used_key_takes_no_other_request(state: StateChange, call: Call) -> Iterator[str]:
    """I6: a different request with a used key is refused. This is not checked where the wall clock
    leaps by days, because the record of the key may have expired."""
    if state.history.leaps_days or call.key is None or not call.is_accepted:
        return
    first = next(
        other
        for other in state.history.calls
        if is_same_key(other, call) and is_in_force(other, call) and other.is_accepted
    )
    if first.body != call.body:
        yield f"call {call.number} was accepted under the key of call {first.number}"


def _is_keyed_success(call: Call) -> bool:
    return call.key is not None and call.is_accepted and call.method == "POST"
