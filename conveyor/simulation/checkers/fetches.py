"""Checks fetches: each has a claim, happens once per claim, and stays within the limits of its job
(I17, I18, I29, I55)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

from conveyor.domain.changes import TaskKey
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import RunStatus, Task, TaskStatus
from conveyor.simulation.client_history import Fetch
from conveyor.simulation.invariant_monitor import StateChange

OVERSHOOT = 2
"""Where leases were lost or outlived, a job may have this many times its limit in flight."""


def no_fetch_without_a_claim(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I17: a worker fetches a task only under a claim in the task's row, or for the first delivery
    of its message. Without faults, no other worker has a claim on the task then."""
    task = state.after.tasks.get((fetch.run_id, fetch.task_id))
    if task is None:
        return
    is_late = not fetch.claim and task.claim and state.history.is_fault_free
    if fetch.claim > task.claim or is_late:
        yield f"task {_name(fetch)} is fetched under claim {fetch.claim}, its row has {task.claim}"


def a_claim_fetches_once(state: StateChange) -> Iterator[str]:
    """I17: the gateway is called at most once per claim, so a task is fetched at most as often as
    it was claimed."""
    fetches = state.history.fetches
    counts = Counter((fetch.run_id, fetch.task_id, fetch.claim_id) for fetch in fetches)
    for (run_id, task_id, claim), count in counts.items():
        if count > 1:
            yield f"task {run_id}/{task_id} was fetched {count} times under claim {claim}"


def every_fetch_is_an_attempt(state: StateChange) -> Iterator[str]:
    """I17: in a world without internal faults a task is fetched once per attempt. A task that was
    handed back may have been fetched more often: its message returned before its claim was written
    (seed 2107). A first delivery that is handed back leaves no trace in the row."""
    if not state.history.is_fault_free or state.history.kills_count:
        return
    fetches = state.history.fetches
    counts = Counter((fetch.run_id, fetch.task_id) for fetch in fetches)
    firsts = Counter((fetch.run_id, fetch.task_id) for fetch in fetches if not fetch.claim)
    for address, task in state.after.tasks.items():
        run = state.after.run_by_id.get(task.run_id)
        is_whole = run is not None and run.status is RunStatus.COMPLETED
        is_fetched_here = task.source_run_id is None and task.duplicate_of is None
        if not is_whole or not is_fetched_here or task.status not in TASK_TERMINAL:
            continue
        count, first = counts[task.run_id, task.task_id], firsts[task.run_id, task.task_id]
        if first > 1:
            yield f"task {'/'.join(address)} was fetched as a first delivery {first} times"
        if not task.attempts <= count <= task.attempts + task.handed_back + first:
            tried = f"{count} times for {task.attempts} attempts"
            yield f"task {'/'.join(address)} was fetched {tried}"


def no_job_is_fetched_beyond_its_cap(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I29: no more pages of a job are fetched at once than its `max_inflight`. Where leases or
    their holders had faults, twice as many are allowed, or as many per worker if that is more."""
    run = state.after.run_by_id.get(fetch.run_id)
    job = state.after.jobs.get((run.job_id,)) if run is not None else None
    if job is None:
        return
    own = {job_run.run_id for job_run in state.after.runs_by_job[job.job_id]}
    count = sum(other_fetch.run_id in own for other_fetch in state.history.in_flight())
    history = state.history
    times = 1 if history.is_fault_free else max(OVERSHOOT, history.workers_count)
    most = job.max_inflight * times
    if count > most:
        yield f"{count} pages of job {job.job_id} are fetched at once, limit {most}"


def _name(fetch: Fetch) -> str:
    return f"{fetch.run_id}/{fetch.task_id}"


# Bodies: what a successful task names can still be read at the end (I18).


def every_success_keeps_its_body(state: StateChange) -> Iterator[str]:
    """I18: the body of every successful task is still stored unchanged at the end, also for tasks
    that a later run inherited. This is not checked where the wall clock leaps by days, because
    results expire by it."""
    if state.history.leaps_days:
        return
    for run in state.after.runs.values():
        if state.is_deleted(run):
            continue
        for task in state.after.tasks_by_run.get(run.run_id, []):
            if task.status is not TaskStatus.SUCCESSFUL or task.result is None:
                continue
            body = state.body(task.result.key)
            if body is None:
                yield f"task {run.run_id}/{task.task_id}: its body is gone"
            elif hashlib.sha256(body).hexdigest() != task.result.sha256:
                yield f"task {run.run_id}/{task.task_id}: its body was replaced"


# Markers: the first line of each page names the request that it answers, so that mixed-up answers
# are found (I55).


HOSTILE_PATH = "/hostile/"
REDIRECTED_TO = "https://elsewhere.example/again"


def every_body_answers_its_own_request(state: StateChange) -> Iterator[str]:
    """I55: the body of a successful task answers the request of that task, under that claim."""
    for change in state.changed(TaskKey):
        task: Task | None = change.new
        is_new = change.old is None or change.old.status is not TaskStatus.SUCCESSFUL
        if task is None or task.status is not TaskStatus.SUCCESSFUL or not is_new:
            continue
        if task.result is None or task.source_run_id is not None or task.duplicate_of is not None:
            continue
        if HOSTILE_PATH in task.url:
            # A hostile caller makes its site send wrong answers. It may receive them, other callers
            # may not.
            continue
        body = state.body(task.result.key)
        if body:
            yield from _compare(state, task, body)


def _compare(state: StateChange, task: Task, body: bytes) -> Iterator[str]:
    marker, _, url = body.partition(b"\n")[0].decode(errors="replace").partition(" ")
    own = f"{task.run_id}-{task.task_id}-{task.claim}"
    if task.claim == 1 and marker.startswith(f"{task.run_id}-{task.task_id}-0."):
        own = marker  # A first delivery fetched the page and settled the task.
    if HOSTILE_PATH in url and _caller_of(state, marker) == _caller_of(state, own):
        # The wrong answer reached only the caller that caused it, or one that sent the same
        # request.
        return
    if marker != own or url not in {task.url, REDIRECTED_TO}:
        yield f"task {own}: its body answers {marker} for {url}"


def _caller_of(state: StateChange, marker: str) -> str | None:
    run = state.after.run_by_id.get(marker.partition("-")[0])
    return None if run is None else run.caller
