"""Checks tasks: their transitions, claims, bodies and messages (SPEC.md 6: I14 to I20, I35)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import TaskKey
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL
from conveyor.domain.model import RunStatus, Task, TaskStatus
from conveyor.simulation.backends.snapshot import RowChange
from conveyor.simulation.client_history import Call, Fetch
from conveyor.simulation.invariant_monitor import Acked, StateChange

_LEGAL = {
    TaskStatus.PENDING: frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING}),
    TaskStatus.PROCESSING: frozenset(TaskStatus),
    TaskStatus.SUCCESSFUL: frozenset({TaskStatus.SUCCESSFUL}),
    TaskStatus.FAILED: frozenset({TaskStatus.FAILED}),
}

# How long the sweeper may take: an index may be a minute late, and the sweeper has other runs to
# check.
_FOUND_S = 120.0


def _updates(state: StateChange) -> Iterator[RowChange]:
    return (change for change in state.changed(TaskKey) if change.old is not None and change.new)


def tasks_make_only_legal_transitions(state: StateChange) -> Iterator[str]:
    """I14: tasks make only legal transitions, and an ended task does not change.

    A pending task may end in one step only together with a new claim number: a first delivery
    writes both at once, and if the monitor compares rarely, a claim and a settle fall between two
    snapshots.
    """
    for change in _updates(state):
        old, new = change.old, change.new
        skipped = old.status is TaskStatus.PENDING and new.claim > old.claim
        if new.status not in _LEGAL[old.status] and not skipped:
            yield f"task {_name(new)} went from {old.status} to {new.status}"
        if old.status in TASK_TERMINAL:
            yield f"task {_name(new)} changed after it was {old.status}"


def claims_only_grow(state: StateChange) -> Iterator[str]:
    """I15: claim numbers never fall, and the result of an ended task belongs to the current
    claim."""
    for change in _updates(state):
        old, new = change.old, change.new
        if new.claim < old.claim or new.attempts < old.attempts:
            yield f"task {_name(new)}: claim or attempts decreased"
        if new.attempts + new.handed_back > new.claim:
            yield f"task {_name(new)}: more attempts than claims"
        ended = new.status in TASK_TERMINAL and old.status not in TASK_TERMINAL
        if ended and new.attempts == old.attempts:
            yield f"task {_name(new)} ended without an attempt"
        is_own = new.result is not None and new.duplicate_of is None
        if ended and is_own and not _is_of_claim(new.result.key, new.claim):
            yield f"task {_name(new)}: claim {new.claim} ended it with {new.result.key}"


def _is_of_claim(key: str, claim: int) -> bool:
    """Whether the claim may have stored this body. A body with a key of its own has the claim in
    its key; a body in a pack does not. A first delivery stores its body under claim 0 and is
    settled as claim 1."""
    kind, _, claim_id = key.rpartition("/")[2].partition(".")
    number, _, nonce = claim_id.partition(".")
    is_first = number == "0" and nonce != "" and claim == 1
    return kind == "pack" or is_first or claim_id == str(claim)


def attempts_are_bounded(state: StateChange) -> Iterator[str]:
    """I16: no task is attempted more often than its job allows."""
    for change in _updates(state):
        task: Task = change.new
        run = state.after.run_by_id.get(task.run_id)
        job = state.after.jobs.get((run.job_id,)) if run is not None else None
        # When a task is failed for losing its workers, that counts as one more attempt.
        if job is not None and task.attempts > job.max_attempts + 1:
            yield f"task {_name(task)} had {task.attempts} attempts, at most {job.max_attempts}"


def a_task_that_loses_its_workers_is_failed(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I16: a task that lost too many workers is not fetched again. It is only failed; that may take
    several claims, because the workers that do it may be lost as well."""
    task: Task | None = state.after.rows[TaskKey].get((fetch.run_id, fetch.task_id))
    if task is None:
        return
    lost = fetch.claim - 1 - task.attempts - task.handed_back
    if lost > limits.LOST_WORKERS_MAX:
        yield f"task {_name(task)} lost {lost} workers and is fetched again"


def a_success_has_its_body(state: StateChange) -> Iterator[str]:
    """I18: the body that a successful task names is stored, with the stated length and digest."""
    for change in state.changed(TaskKey):
        task = change.new
        is_new = change.old is None or change.old.status is not TaskStatus.SUCCESSFUL
        if task is None or task.status is not TaskStatus.SUCCESSFUL or not is_new:
            continue
        if task.result is None:
            yield f"task {_name(task)} is successful without a result"
            continue
        if task.source_run_id is not None:
            continue  # Its body belongs to another run and was checked there.
        body = state.body(task.result.key)
        if body is None:
            yield f"task {_name(task)}: there is no body at {task.result.key}"
        elif len(body) != task.result.size_bytes:
            yield f"task {_name(task)}: its body has {len(body)} bytes"
        elif hashlib.sha256(body).hexdigest() != task.result.sha256:
            yield f"task {_name(task)}: its body has another digest"


def only_messages_of_ended_tasks_are_acked(state: StateChange, acked: Acked) -> Iterator[str]:
    """I19: a message is acked only if its task or its run has ended."""
    for run_id, task_id in acked.refs:
        task = state.after.tasks.get((run_id, task_id))
        run = state.after.run_by_id.get(run_id)
        is_over = run is None or run.status not in RUN_LIVE or run.stop_requested_at is not None
        if not is_over and (task is None or task.status not in TASK_TERMINAL):
            yield f"{acked.process} acks {run_id}/{task_id}, which has not ended"


def an_idle_run_is_found(state: StateChange) -> Iterator[str]:
    """I20: once faults are over, the sweeper soon finds a live run with unfinished tasks but
    without a message or claim. It leaves a run alone whose queue is only slow."""
    for run_id, since in state.history.idle_since.items():
        waited_s = state.after.at - since
        if waited_s > state.history.sweep_s + _FOUND_S:
            yield f"run {run_id} is idle with unfinished tasks for {waited_s:.0f} s"


def _name(task: Task) -> str:
    return f"{task.run_id}/{task.task_id}"


# Reruns (I35).


def a_rerun_has_every_line(state: StateChange) -> Iterator[str]:
    """I35: each completed run of a job has at least as many tasks as the job has accepted lines."""
    for accepted in state.history.accepted_requests.values():
        for run in state.after.runs_by_job.get(accepted.job_id, []):
            count = len(state.after.tasks_by_run.get(run.run_id, []))
            if run.status is RunStatus.COMPLETED and count < accepted.lines_count:
                yield f"run {run.run_id}: {accepted.lines_count} lines accepted, {count} tasks"


def what_was_accepted_can_be_run_again(state: StateChange, call: Call) -> Iterator[str]:
    """I35: a rerun of all lines of a job that has some is never told that no task matches."""
    if not call.path.endswith("/rerun") or b"no_matching_tasks" not in call.answer:
        return
    accepted = state.history.accepted_requests.get(call.path.split("/")[-2])
    if accepted is not None and accepted.lines_count:
        yield f"call {call.number} found none of {accepted.lines_count} lines of {accepted.job_id}"
