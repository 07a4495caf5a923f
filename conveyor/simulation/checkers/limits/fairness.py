"""Checks fairness: a small job ends soon, whatever other callers do (I56)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from conveyor.simulation.invariant_monitor import StateChange

# The bound of I56: twice the time alone plus five seconds.
TIMES_SOLO, PLUS_S = 2.0, 5.0


def a_small_job_ends_soon_beside_hostile_callers(state: StateChange) -> Iterator[str]:
    """I56: beside hostile callers a small job takes at most twice its time alone plus five seconds.
    This is checked only in worlds without other disturbances. The first small job of a world ran
    alone. If no signal tells workers of a new run, a job also waits for the next scan, which may
    come at once for the first job and late for another (seed 938)."""
    history = state.history
    if not history.is_undisturbed:
        return
    took = [seconds for seconds in map(partial(_seconds_of, state), history.small_jobs) if seconds]
    for took_s in took[1:]:
        if took_s > TIMES_SOLO * took[0] + PLUS_S + history.scan_s:
            yield f"a small job took {took_s:.1f} s beside hostile callers, {took[0]:.1f} s alone"


def _seconds_of(state: StateChange, job_id: str) -> float | None:
    """The duration of the small job's run; None if it has not ended."""
    for run in state.after.runs_by_job.get(job_id, ()):
        if run.ended_at is not None:
            return run.ended_at - run.created_at
    return None
