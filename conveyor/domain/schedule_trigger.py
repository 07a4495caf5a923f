"""Triggers: the guarded changes that create a run for a nominal time, and that create, replace,
pause and resume a schedule (SPEC.md 4.17).

Every change of a schedule's row raises its version and is guarded by it, so that concurrent changes
of processes and callers happen one after the other. The id of a run is a function of the job and
the nominal time: the same time can never create a second run, whatever the row contains.
"""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain import lifecycle, limits
from conveyor.domain.changes import Change, Guard, Insert, JobKey, ScheduleKey, Update
from conveyor.domain.ids import FIRST_BATCH, RunId
from conveyor.domain.lifecycle import SCHEDULE, SCHEDULE_FIRES, ScheduleEvent
from conveyor.domain.model import Batch, IngestStatus, Job, Run
from conveyor.domain.schedule import (
    Overlap,
    Rate,
    Rule,
    Schedule,
    ScheduleStatus,
    Skip,
    SkipReason,
    next_after,
)
from conveyor.domain.submit import admission


class TriggerResult(msgspec.Struct, frozen=True):
    """The result of a nominal time: a change, and the run that it creates, if any."""

    change: Change
    run: Run | None


def new_job(job: Job, schedule: Schedule) -> Change:
    """Creates a scheduled job. It has no run until its first nominal time."""
    return Change((Insert(JobKey(job.job_id), job), Insert(ScheduleKey(schedule.job_id), schedule)))


def is_due(schedule: Schedule, *, now: float) -> bool:
    return (
        schedule.status in SCHEDULE_FIRES
        and schedule.next_fire_at is not None
        and schedule.next_fire_at <= now
    )


def trigger(
    job: Job, schedule: Schedule, run_id: RunId, *, exists: bool, now: float
) -> TriggerResult | None:
    """Decides about a nominal time that is due. None means: wait until the live run has ended.

    `exists`: the time has a run already. Nominal times that passed meanwhile are skipped: one run
    replaces all of them, however late it is.
    """
    nominal = _nominal(schedule)
    missed = _skips_until(schedule, now)
    # The second condition covers a run that was deleted before the clock was set back.
    if exists or nominal == schedule.last_fire_at:
        return TriggerResult(_advance(schedule, missed, now), None)
    if job.active_run_id is not None:
        if schedule.overlap is Overlap.QUEUE:
            return None
        gave_way = Skip(nominal, nominal, SkipReason.OVERLAP)
        return TriggerResult(_advance(schedule, (gave_way, *missed), now), None)
    run, batch = make_run(job, schedule, run_id, now=now)
    run = msgspec.structs.replace(run, scheduled_for=nominal)
    started = admission.new_run(job, run, [batch], [])
    moved = _advance(schedule, missed, now, last_fire_at=nominal)
    return TriggerResult(Change((*moved.writes, *started.writes), started.effects), run)


def make_run(job: Job, schedule: Schedule, run_id: RunId, *, now: float) -> tuple[Run, Batch]:
    """Makes a run of the job's own list. The list is ingested later, not by the trigger."""
    run = msgspec.structs.replace(
        admission.make_run_row(job, run_id, sequence=job.runs_count + 1, now=now),
        planned=schedule.total,
        open_batches=1,
        last_batch_received=True,
        ingest_status=IngestStatus.PENDING,
        retried=schedule.total,
    )
    batch = admission.make_batch(run, FIRST_BATCH, schedule.source, total=schedule.total, now=now)
    return run, batch


def replace(schedule: Schedule, rule: Rule, overlap: Overlap, *, now: float) -> Change | None:
    """Replaces the rule; None if it is the same. An interval starts again from now."""
    if _is_same(schedule.rule, rule) and schedule.overlap is overlap:
        return None
    values = {"rule": rule, "overlap": overlap, "next_fire_at": _next(schedule, rule, now)}
    return _update(schedule, frozenset(ScheduleStatus), values, now)


def realign(schedule: Schedule, *, now: float) -> Change | None:
    """Recomputes the next nominal time; None if the row is right.

    The row is wrong if it was written while the clock was ahead. A nominal time that has a run
    creates no second one.
    """
    rule = _rule_from_now(schedule.rule, now)
    coming = _next(schedule, rule, now)
    if schedule.next_fire_at is None or coming is None or coming >= schedule.next_fire_at:
        return None
    values = {"rule": rule, "next_fire_at": coming}
    return _update(schedule, SCHEDULE_FIRES, values, now)


def _rule_from_now(rule: Rule, now: float) -> Rule:
    """Makes an interval with a future start begin now: the clock was ahead when it was set."""
    if isinstance(rule, Rate) and rule.anchor_at > now + limits.CLOCK_SKEW_S:
        return msgspec.structs.replace(rule, anchor_at=now)
    return rule


def pause(schedule: Schedule, *, now: float) -> Change:
    return _set_status(schedule, ScheduleEvent.PAUSED, {}, now)


def resume(schedule: Schedule, *, now: float) -> Change:
    """Resumes a schedule. Nominal times that passed during the pause are skipped."""
    rule = _rule_from_now(schedule.rule, now)
    values: dict[str, Any] = {"rule": rule, "next_fire_at": _next(schedule, rule, now)}
    first_at = schedule.next_fire_at
    if first_at is not None and first_at <= now:
        values["skips"] = _with(schedule, (Skip(first_at, now, SkipReason.PAUSED),))
    return _set_status(schedule, ScheduleEvent.RESUMED, values, now)


def _set_status(
    schedule: Schedule, event: ScheduleEvent, values: dict[str, Any], now: float
) -> Change:
    status = lifecycle.target(SCHEDULE, event)
    sources = lifecycle.sources(SCHEDULE, event)
    return _update(schedule, sources, {"status": status, **values}, now)


def _advance(schedule: Schedule, skips: tuple[Skip, ...], now: float, **values: Any) -> Change:
    following = next_after(schedule.rule, max(now, _nominal(schedule)))
    values |= {"next_fire_at": following, "skips": _with(schedule, skips)}
    return _update(schedule, SCHEDULE_FIRES, values, now)


def _update(
    schedule: Schedule, statuses: frozenset[ScheduleStatus], values: dict[str, Any], now: float
) -> Change:
    guard = Guard(status_in=statuses, equals=(("version", schedule.version),))
    values = {**values, "updated_at": now}
    return Change((Update(ScheduleKey(schedule.job_id), guard, values, {"version": 1}),))


def _nominal(schedule: Schedule) -> float:
    assert schedule.next_fire_at is not None
    return schedule.next_fire_at


def _skips_until(schedule: Schedule, now: float) -> tuple[Skip, ...]:
    first_at = next_after(schedule.rule, _nominal(schedule))
    if first_at is None or first_at > now:
        return ()
    return (Skip(first_at, now, SkipReason.MISSED),)


def _with(schedule: Schedule, skips: tuple[Skip, ...]) -> tuple[Skip, ...]:
    return (*schedule.skips, *skips)[-limits.SKIPS_KEPT_MAX :]


def _next(schedule: Schedule, rule: Rule, now: float) -> float | None:
    """Returns the next nominal time, but not the last one that created a run, even if the clock was
    set back. Other times that already have a run create no second one."""
    coming = next_after(rule, now)
    if coming is not None and coming == schedule.last_fire_at:
        return next_after(rule, coming)
    return coming


def _is_same(rule: Rule, other: Rule) -> bool:
    if isinstance(rule, Rate) and isinstance(other, Rate):
        return (rule.every, rule.unit) == (other.every, other.unit)
    return rule == other
