"""Checks schedules: each nominal time makes one run or one skip (SPEC.md 4.17)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from conveyor.domain.changes import RunKey, ScheduleKey
from conveyor.domain.schedule import Schedule, next_after
from conveyor.simulation.invariant_monitor import StateChange

TIMES_MAX = 20
"""At most this many nominal times are checked when a schedule moves on after a long absence."""


def a_nominal_time_makes_one_run(state: StateChange) -> Iterator[str]:
    """No two runs of a job have the same nominal time."""
    for change in state.changed(RunKey):
        if change.old is not None or change.new is None or change.new.scheduled_for is None:
            continue
        times = Counter(run.scheduled_for for run in state.after.runs_by_job[change.new.job_id])
        count = times[change.new.scheduled_for]
        if count > 1:
            yield f"job {change.new.job_id} fired {count} times for {change.new.scheduled_for:.0f}"


def no_nominal_time_is_left_out(state: StateChange) -> Iterator[str]:
    """When a schedule moves on, each nominal time in between has made a run or is recorded as
    skipped."""
    for change in state.changed(ScheduleKey):
        old: Schedule | None = change.old
        new: Schedule | None = change.new
        if old is None or new is None or old.rule != new.rule or old.next_fire_at is None:
            continue
        nominal = old.next_fire_at
        if new.next_fire_at == nominal or nominal > state.after.now:
            continue
        scheduled_times = {run.scheduled_for for run in state.after.runs_by_job.get(new.job_id, [])}
        if _was_deleted(state, new.job_id):
            continue
        for nominal_time in _nominal_times(old, new.next_fire_at):
            is_skip = any(skip.first_at <= nominal_time <= skip.until for skip in new.skips)
            if nominal_time not in scheduled_times and not is_skip:
                yield f"job {new.job_id} neither fired nor skipped {nominal_time:.0f}"


def _nominal_times(schedule: Schedule, until: float | None) -> Iterator[float]:
    """The nominal times from the one that the schedule waited for until the one that it waits for
    now."""
    nominal = schedule.next_fire_at
    for _ in range(TIMES_MAX):
        if nominal is None or (until is not None and nominal >= until):
            return
        yield nominal
        nominal = next_after(schedule.rule, nominal)
        if until is None:
            return


def _was_deleted(state: StateChange, job_id: str) -> bool:
    """Whether a caller deleted a run of the job: it may be the run of a nominal time."""
    own = f"/{job_id}/runs/"
    return any(call.method == "DELETE" and own in call.path for call in state.history.calls)
