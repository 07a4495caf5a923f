"""Checks leases and claims (SPEC.md 6: I15, I17, I29 to I31)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.changes import TaskKey
from conveyor.domain.model import JobStatus, Task, TaskStatus
from conveyor.domain.timing import is_unreal
from conveyor.simulation.backends.snapshot import Lease
from conveyor.simulation.invariant_monitor import StateChange

# A worker learns of the end of a run with its next heartbeat, and a lease that it does not renew
# expires. Calls may arrive a minute late, and clocks may be ahead.
_MOMENT_S = 1.0
# Engines accept a renewal up to two minutes after its instant was computed.
_LIFE_S_MAX = max(limits.LEASE_TTL_S, limits.SCRAPE_DEADLINE_S) + 120.0
# A heartbeat and the lifetime of a lease, a late call (60 s) and the error of clocks (20 s).
_GIVEN_BACK_S = limits.HEARTBEAT_S + limits.LEASE_TTL_S + 60.0 + 20.0


def leases_stay_within_the_cap(state: StateChange) -> Iterator[str]:
    """I29: a job never has more live leases than its `max_inflight`."""
    capped = [lease.job_id for lease in state.after.leases if lease.is_capped]
    for job_id, count in sorted(Counter(capped).items()):
        job = state.after.jobs.get((job_id,))
        if job is not None and count > job.max_inflight:
            yield f"job {job_id} has {count} leases, max_inflight {job.max_inflight}"


def a_lease_is_given_back_by_its_holder(state: StateChange) -> Iterator[str]:
    """I30: a live lease is removed only by its holder. Two exceptions look alike and are not
    reported: a process whose clock is ahead may take an expired place and leave it before the next
    snapshot; and a process whose clock was put back renews its lease to an end in the past."""
    if not state.history.sees_leases:
        return
    places = {_place(lease) for lease in state.after.leases}
    for lease in state.before.leases:
        job = state.after.jobs.get((lease.job_id,))
        is_gone = bool(lease.name) and _place(lease) not in places
        if not is_gone or job is None or job.status is JobStatus.DELETED:
            continue
        if lease.expires_at > state.after.now and lease.name not in state.history.released:
            yield f"a live lease of run {lease.run_id} was not removed by its holder"


def _place(lease: Lease) -> str:
    return lease.name.rpartition("#")[0]


def an_ended_run_holds_nothing(state: StateChange) -> Iterator[str]:
    """I31: once faults are over, the leases of a run are given back soon after its end. Leases of
    dead processes expire, also those whose request was still in progress (seed 597). A worker that
    learns late of the end may take a lease for a moment (seed 4612). This is not checked where
    clocks step: a process whose clock was ahead took leases that last too long."""
    calm_since = state.history.calm_since or 0.0
    for lease in () if state.history.steps_clocks else state.after.leases:
        run = state.after.run_by_id.get(lease.run_id)
        is_new = lease.expires_at - state.after.now > limits.LEASE_TTL_S - _MOMENT_S
        if run is None or run.ended_at is None or is_new:
            continue
        if state.after.now - max(run.ended_at, calm_since) > _GIVEN_BACK_S:
            yield f"a lease of run {lease.run_id} is held; it ended at {run.ended_at:.3f}"


def dead_processes_hold_nothing(state: StateChange) -> Iterator[str]:
    """I31: in the end no lease is left that any process counts."""
    left = [lease for lease in state.after.leases if not _is_disregarded(lease, state.after.now)]
    if left:
        yield f"{len(left)} leases are left"


def _is_disregarded(lease: Lease, now: float) -> bool:
    """Whether the lease was written by a clock that was ahead: it ends later than any lease can
    last, so no process counts it, and its row stays until then (seed 406). Only leases that are
    rows with names have ends that processes computed."""
    return bool(lease.name) and is_unreal(lease.expires_at, now=now, ttl_s=_LIFE_S_MAX)


# Claims: which worker may take a task, and under which claim it ended (I15, I17).


def a_live_claim_is_left_alone(state: StateChange) -> Iterator[str]:
    """I17: a task is taken over only if its claim has expired by the clock of the new worker, or
    ends further ahead than a claim can."""
    for change in state.changed(TaskKey):
        old, new = change.old, change.new
        if old is None or new is None or old.status is not TaskStatus.PROCESSING:
            continue
        taken_over = new.claim == old.claim + 1 and _ends(new) == _ends(old)
        if not taken_over or new.started_at is None:
            continue
        until, now = old.claim_until, new.started_at
        if now <= until and not is_unreal(until, now=now, ttl_s=limits.CLAIM_TTL_S):
            yield f"task {new.run_id}/{new.task_id} taken over from live claim {old.claim}"


def an_attempt_ends_under_its_own_claim(state: StateChange) -> Iterator[str]:
    """I15: the attempt that ended is the one that the current claim started."""
    for change in state.changed(TaskKey):
        old, new = change.old, change.new
        if old is None or new is None or new.attempts == old.attempts:
            continue
        is_in_hand = new.status is TaskStatus.PROCESSING
        if not is_in_hand and new.history and new.history[-1].started_at != new.started_at:
            yield f"task {new.run_id}/{new.task_id} ended under an older claim than {new.claim}"


def _ends(task: Task) -> int:
    return task.attempts + task.handed_back
