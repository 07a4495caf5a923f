"""Schedules in JSON: requests and responses have the same form
(docs/api.md, Schedules)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.schedule.schedule import (
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
    every: Annotated[int, Meta(ge=1, le=limits.RATE_EVERY_MAX)]
    unit: Literal["minute", "hour", "day"]


class Daily(_Shape, frozen=True, kw_only=True):
    """Every day."""


class Weekly(_Shape, frozen=True, kw_only=True):
    days: Annotated[list[Weekday], Meta(min_length=1, max_length=7)]


class Monthly(_Shape, frozen=True, kw_only=True):
    """On days of the month. A month without such a day skips it."""

    days: Annotated[list[Annotated[int, Meta(ge=1, le=31)]], Meta(min_length=1, max_length=31)]


class Cadence(_Shape, frozen=True, kw_only=True, omit_defaults=True):
    """The days of a calendar rule: exactly one of these fields."""

    daily: Daily | None = None
    weekly: Weekly | None = None
    monthly: Monthly | None = None


class CalendarInput(_Shape, frozen=True, kw_only=True):
    times_of_day: Annotated[
        list[Annotated[str, Meta(pattern=_TIME)]],
        Meta(min_length=1, max_length=limits.TIMES_OF_DAY_MAX),
    ]
    cadence: Cadence


class JobSchedule(_Shape, frozen=True, kw_only=True, omit_defaults=True):
    """When a job runs: exactly one of `at`, `rate`, `calendar` and `cron`."""

    at: (
        Annotated[str, Meta(pattern=_LOCAL, description="Once, at this time on the wall.")] | None
    ) = None
    rate: RateInput | None = None
    calendar: CalendarInput | None = None
    cron: (
        Annotated[
            str,
            Meta(
                max_length=limits.CRON_CHARS_MAX,
                description="Minute, hour, day of the month, month, day of the week.",
            ),
        ]
        | None
    ) = None
    timezone: Annotated[str, Meta(description="An IANA name; needed by all but `rate`.")] | None = (
        None
    )
    overlap: Annotated[
        Literal["skip", "queue"],
        Meta(description="What a fire does while an earlier run is live: give way, or wait."),
    ] = "skip"


class UpdateScheduleStateRequest(_Shape, frozen=True, kw_only=True):
    schedule_state: Literal["active", "paused"]


class SkippedFires(msgspec.Struct, frozen=True, kw_only=True):
    """Nominal times without a run, from the first one until an instant."""

    first_at: str
    until: str
    reason: str


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
