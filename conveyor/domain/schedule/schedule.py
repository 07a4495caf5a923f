"""Schedules: the rules of scheduled jobs, and the row with their progress (SPEC.md 4.17)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from enum import StrEnum
from itertools import pairwise
from typing import assert_never

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import JobId
from conveyor.domain.model import Source
from conveyor.domain.schedule.cron import (
    BadCron,
    UnknownZone,
    day_of,
    first_after,
    instant_of,
    load_zone,
    parse_cron,
)

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

# The search for the next day ends here. Between two 29 February there can be eight years, as around
# 2100.
_DAYS_AHEAD_MAX = 8 * 366


class RateUnit(StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


_UNIT_S = {RateUnit.MINUTE: 60, RateUnit.HOUR: 3600, RateUnit.DAY: 86400}


class At(msgspec.Struct, frozen=True, tag="at"):
    """Triggers once, at this wall time."""

    at: str  #: Local date and time.
    timezone: str  #: IANA name of the time zone.


class Rate(msgspec.Struct, frozen=True, tag="rate"):
    """Triggers at a fixed interval, independent of clock changes."""

    every: int  #: How many units between two nominal times.
    unit: RateUnit  #: minute, hour or day.
    anchor_at: float  #: When the rule was set, in whole seconds.


class Calendar(msgspec.Struct, frozen=True, tag="calendar"):
    """Triggers at these wall times, every day, on weekdays, or on days of the month."""

    times_of_day: tuple[str, ...]  #: Local times, HH:MM.
    timezone: str  #: IANA name of the time zone.
    weekdays: tuple[str, ...] | None = None  #: Only on these days of the week.
    month_days: tuple[int, ...] | None = None  #: Only on these days of the month.


class Cron(msgspec.Struct, frozen=True, tag="cron"):
    cron: str  #: The five cron fields.
    timezone: str  #: IANA name of the time zone.


Rule = At | Rate | Calendar | Cron


class ScheduleStatus(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"


class Overlap(StrEnum):
    """What a trigger does while an earlier run is live: skip, or wait for its end."""

    SKIP = "skip"
    QUEUE = "queue"


class SkipReason(StrEnum):
    MISSED = "missed"
    OVERLAP = "overlap"
    PAUSED = "paused"


class Skip(msgspec.Struct, frozen=True, array_like=True):
    """Nominal times without a run, from `first_at` until `until`."""

    first_at: float  #: The first nominal time that created no run.
    until: float  #: The end of the skipped period.
    reason: SkipReason  #: missed, overlap or paused.


class Schedule(msgspec.Struct, frozen=True):
    """When a scheduled job runs, and the list of its runs."""

    job_id: JobId  #: The job of the schedule.
    status: ScheduleStatus  #: active or paused.
    rule: Rule  #: When the schedule triggers.
    overlap: Overlap  #: skip or queue.
    source: Source  #: The list that every run ingests.
    total: int  #: The lines of that list.
    created_at: float  #: When the job was submitted.
    updated_at: float  #: When the row last changed.
    version: int = 0  #: Raised by every change; guards the next one.
    #: The next nominal time, or the one that is due; absent if there is none.
    next_fire_at: float | None = None
    last_fire_at: float | None = None  #: The latest nominal time that created a run.
    skips: tuple[Skip, ...] = ()  #: The latest skips.


class BadRule(ConveyorError):
    """The rule is invalid. `field` names the wrong field."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field
        self.detail = detail


def check_rule(rule: Rule) -> None:
    """Raises BadRule for an invalid zone, time or expression."""
    if isinstance(rule, Rate):
        return
    try:
        load_zone(rule.timezone)
    except UnknownZone:
        raise BadRule("timezone", "timezone must be an IANA name, like Europe/Berlin.") from None
    if isinstance(rule, At):
        try:
            _local(rule.at)
        except ValueError:
            raise BadRule("at", "at must be a date and time that there is.") from None
    if isinstance(rule, Cron):
        try:
            parse_cron(rule.cron)
        except BadCron as error:
            raise BadRule("cron", f"cron cannot be read: {error}.") from None


def next_after(rule: Rule, instant: float) -> float | None:
    """Returns the first nominal time after `instant`, or None if there is none."""
    match rule:
        case At():
            at = instant_of(_local(rule.at), rule.timezone)
            return at if at > instant else None
        case Rate():
            period_s = rule.every * _UNIT_S[rule.unit]
            count = (instant - rule.anchor_at) // period_s + 1
            return rule.anchor_at + max(1, count) * period_s
        case Calendar():
            minutes = tuple(sorted({_minute_of(text) for text in rule.times_of_day}))
            return _next_on_days(_days_of(rule), minutes, rule.timezone, instant)
        case Cron():
            table = parse_cron(rule.cron)
            return _next_on_days(table.matches, table.minutes, rule.timezone, instant)
        case _:
            assert_never(rule)


def _next_on_days(
    matches: Callable[[date], bool], minutes: tuple[int, ...], zone: str, instant: float
) -> float | None:
    """Searches pairs of days, from yesterday on: a clock change may move a wall time to the next
    day, after other times of that day."""
    today = day_of(instant, zone)
    for pair in pairwise(range(today - 1, today + _DAYS_AHEAD_MAX)):
        found = [
            first
            for ordinal in pair
            if matches(date.fromordinal(ordinal))
            and (first := first_after(instant, ordinal, minutes, zone)) is not None
        ]
        if found:
            return min(found)
    return None


def _days_of(rule: Calendar) -> Callable[[date], bool]:
    if rule.weekdays is not None:
        weekdays = {WEEKDAYS.index(name) for name in rule.weekdays}
        return lambda day: day.weekday() in weekdays
    if rule.month_days is not None:
        month_days = frozenset(rule.month_days)
        return lambda day: day.day in month_days
    return lambda day: True


def _minute_of(text: str) -> int:
    hour, _, minute = text.partition(":")
    return 60 * int(hour) + int(minute)


def _local(text: str) -> datetime:
    return datetime.fromisoformat(text)


def upcoming(schedule: Schedule, now: float) -> float | None:
    """Returns the next nominal time, or the next one after a resume now."""
    if schedule.next_fire_at is not None and schedule.next_fire_at <= now:
        is_waiting = schedule.status is ScheduleStatus.ACTIVE
        return schedule.next_fire_at if is_waiting else next_after(schedule.rule, now)
    return schedule.next_fire_at
