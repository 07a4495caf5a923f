"""Schedules in JSON: requests and responses have the same form
(docs/api.md, Schedules)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.schedule import (
    At,
    BadRule,
    Calendar,
    Cron,
    Overlap,
    Rate,
    RateUnit,
    Rule,
    Schedule,
    ScheduleStatus,
    check_rule,
)

# In Python, `$` also matches before a final line break; `(?!\n)` excludes it.
_TIME = r"^([01][0-9]|2[0-3]):[0-5][0-9]$(?!\n)"
_LOCAL = r"^2[0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?$(?!\n)"

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all parts of a schedule."""


class RateInput(_Shape, frozen=True, kw_only=True):
    """A fixed interval, counted from the time when the rule was set."""

    every: Annotated[int, Meta(ge=1, le=limits.RATE_EVERY_MAX)]  #: The number of units.
    unit: Literal["minute", "hour", "day"]  #: The unit; a day has 24 hours.


class Daily(_Shape, frozen=True, kw_only=True):
    """Every day."""


class Weekly(_Shape, frozen=True, kw_only=True):
    """On days of the week."""

    days: Annotated[list[Weekday], Meta(min_length=1, max_length=7)]  #: The days.


class Monthly(_Shape, frozen=True, kw_only=True):
    """On days of the month. A month without such a day skips it."""

    #: The days, from 1.
    days: Annotated[list[Annotated[int, Meta(ge=1, le=31)]], Meta(min_length=1, max_length=31)]


class Cadence(_Shape, frozen=True, kw_only=True, omit_defaults=True):
    """The days of a calendar rule: exactly one of these fields."""

    daily: Daily | None = None  #: Every day.
    weekly: Weekly | None = None  #: On days of the week.
    monthly: Monthly | None = None  #: On days of the month.


class CalendarInput(_Shape, frozen=True, kw_only=True):
    """Times of day on certain days."""

    #: Local times, such as `09:30`.
    times_of_day: Annotated[
        list[Annotated[str, Meta(pattern=_TIME)]],
        Meta(min_length=1, max_length=limits.TIMES_OF_DAY_MAX),
    ]
    cadence: Cadence  #: The days.


class JobSchedule(_Shape, frozen=True, kw_only=True, omit_defaults=True):
    """When a job runs: exactly one of `at`, `rate`, `calendar` and `cron`."""

    #: Once, at this local date and time, such as `2027-03-01T09:30`.
    at: Annotated[str, Meta(pattern=_LOCAL)] | None = None
    rate: RateInput | None = None  #: At a fixed interval.
    calendar: CalendarInput | None = None  #: At times of day.
    #: Minute, hour, day of the month, month, day of the week.
    cron: Annotated[str, Meta(max_length=limits.CRON_CHARS_MAX)] | None = None
    timezone: str | None = None  #: An IANA name. All rules but `rate` need it.
    #: What a nominal time does while an earlier run is live: it is skipped, or waits for its end.
    overlap: Literal["skip", "queue"] = "skip"


class UpdateScheduleStateRequest(_Shape, frozen=True, kw_only=True):
    """The new state of a schedule."""

    schedule_state: Literal["active", "paused"]  #: A `paused` schedule starts no run.


class SkippedFires(msgspec.Struct, frozen=True, kw_only=True):
    """Nominal times without a run, from the first one until an instant."""

    first_at: str  #: The first of them.
    until: str  #: The instant after the last of them.
    reason: str  #: Why no run was started.


def rule_from(schedule: JobSchedule, *, pointer: str, now: float) -> Rule:
    """Returns the rule of a schedule. Raises InvalidArgument for an invalid rule."""
    rules = [
        rule
        for rule in (schedule.at, schedule.rate, schedule.calendar, schedule.cron)
        if rule is not None
    ]
    if len(rules) != 1:
        detail = "A schedule has exactly one of at, rate, calendar and cron."
        raise InvalidArgument(detail, pointer=pointer)
    try:
        rule = _rule(schedule, now)
        check_rule(rule)
    except BadRule as error:
        raise InvalidArgument(error.detail, pointer=f"{pointer}/{error.field}") from None
    return rule


def _rule(schedule: JobSchedule, now: float) -> Rule:
    if schedule.rate is not None:
        # Whole seconds, because a nominal time is part of the id of its run.
        return Rate(schedule.rate.every, RateUnit(schedule.rate.unit), float(int(now)))
    if schedule.timezone is None:
        raise BadRule("timezone", "Send a timezone: a time of day needs one.")
    if schedule.at is not None:
        return At(schedule.at, schedule.timezone)
    if schedule.cron is not None:
        return Cron(schedule.cron, schedule.timezone)
    assert schedule.calendar is not None
    return _calendar(schedule.calendar, schedule.timezone)


def _calendar(calendar: CalendarInput, timezone: str) -> Calendar:
    cadence = calendar.cadence
    choices = (cadence.daily, cadence.weekly, cadence.monthly)
    chosen = [choice for choice in choices if choice is not None]
    if len(chosen) != 1:
        raise BadRule("calendar/cadence", "cadence has exactly one of daily, weekly and monthly.")
    times = tuple(dict.fromkeys(calendar.times_of_day))
    match chosen[0]:
        case Weekly(days=names):
            return Calendar(times, timezone, weekdays=tuple(dict.fromkeys(names)))
        case Monthly(days=numbers):
            return Calendar(times, timezone, month_days=tuple(dict.fromkeys(numbers)))
        case _:
            return Calendar(times, timezone)


def schedule_view(schedule: Schedule) -> JobSchedule:
    shape = _shape_of(schedule.rule)
    is_default = schedule.overlap is Overlap.SKIP
    return shape if is_default else msgspec.structs.replace(shape, overlap="queue")


def _shape_of(rule: Rule) -> JobSchedule:
    match rule:
        case At(at, timezone):
            return JobSchedule(at=at, timezone=timezone)
        case Cron(cron, timezone):
            return JobSchedule(cron=cron, timezone=timezone)
        case Rate(every, unit, _):
            return JobSchedule(rate=msgspec.convert({"every": every, "unit": unit}, RateInput))
        case Calendar():
            calendar = {"times_of_day": rule.times_of_day, "cadence": _cadence_of(rule)}
            shape = {"calendar": calendar, "timezone": rule.timezone}
            return msgspec.convert(shape, JobSchedule)


def _cadence_of(rule: Calendar) -> dict[str, object]:
    if rule.weekdays is not None:
        return {"weekly": {"days": rule.weekdays}}
    if rule.month_days is not None:
        return {"monthly": {"days": rule.month_days}}
    return {"daily": {}}


def state_from(request: UpdateScheduleStateRequest) -> ScheduleStatus:
    return ScheduleStatus(request.schedule_state)
