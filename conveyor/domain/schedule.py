"""Schedules: the rules of scheduled jobs, the instants that follow from them, and the row that has
their progress (SPEC.md 4.17)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple, assert_never
from zoneinfo import ZoneInfo

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import JobId
from conveyor.domain.model import Source

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

# The search for the next day ends here. Between two 29 February there can be eight years, as around
# 2100.
_DAYS_AHEAD_MAX = 8 * 366
# The next nominal times that a job shows, and the days in which the one after another is searched:
# enough for every day of the month, and cheap where a list has hundreds of rare schedules.
UPCOMING_MAX = 5
_SHOWN_DAYS_AHEAD_MAX = 63


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
    """Whether a schedule starts runs."""

    ACTIVE = "active"  #: The schedule starts runs.
    PAUSED = "paused"  #: The schedule starts no run.


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


def next_after(rule: Rule, instant: float, *, days_max: int = _DAYS_AHEAD_MAX) -> float | None:
    """Returns the first nominal time after `instant`, or None if there is none within `days_max`
    days."""
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
            return _next_on_days(_days_of(rule), minutes, rule.timezone, instant, days_max)
        case Cron():
            table = parse_cron(rule.cron)
            return _next_on_days(table.matches, table.minutes, rule.timezone, instant, days_max)
        case _:
            assert_never(rule)


def _next_on_days(
    matches: Callable[[date], bool],
    minutes: tuple[int, ...],
    zone: str,
    instant: float,
    days_max: int,
) -> float | None:
    """Searches pairs of days, from yesterday on: a clock change may move a wall time to the next
    day, after other times of that day."""
    today = day_of(instant, zone)
    for pair in pairwise(range(today - 1, today + days_max)):
        instants = [
            first
            for ordinal in pair
            if matches(date.fromordinal(ordinal))
            and (first := first_after(instant, ordinal, minutes, zone)) is not None
        ]
        if instants:
            return min(instants)
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


def upcoming_times(schedule: Schedule, now: float) -> list[float]:
    """Returns the next nominal times, the first as `upcoming`. A time that is much later than the
    one before it is left out, and those after it."""
    times: list[float] = []
    next_at = upcoming(schedule, now)
    while next_at is not None and len(times) < UPCOMING_MAX:
        times.append(next_at)
        # What waits for a live run is in the past: the times that pass meanwhile are skipped.
        after = max(next_at, now)
        next_at = next_after(schedule.rule, after, days_max=_SHOWN_DAYS_AHEAD_MAX)
    return times


# Cron expressions: parses the five fields into sets of numbers
# (docs/api.md, Schedules).


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class BadCron(ConveyorError):
    """The cron expression is invalid. The message names the wrong field."""


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    names: dict[str, int]


_MINUTE = _Field("minute", 0, 59, {})
_HOUR = _Field("hour", 0, 23, {})
_DAY = _Field("day of the month", 1, 31, {})
_MONTH = _Field("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)})
# Sunday is both 0 and 7, so that a range can end with it.
_WEEKDAY = _Field("day of the week", 0, 7, {name: n for n, name in enumerate(_WEEKDAYS)})


class CronTable(NamedTuple):
    """A parsed expression. `minutes` are minutes of the day. If one day field is free, the other
    decides.
    """

    minutes: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    is_either: bool

    def matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        facts = (day.day in self.days, day.isoweekday() % 7 in self.weekdays)
        return any(facts) if self.is_either else all(facts)


@lru_cache(maxsize=128)
def parse_cron(expression: str) -> CronTable:
    fields = expression.lower().split()
    if len(fields) != 5:
        raise BadCron("it has five fields: minute, hour, day of the month, month, day of the week")
    minute, hour, day, month, weekday = fields
    minutes, hours = _numbers(minute, _MINUTE), _numbers(hour, _HOUR)
    return CronTable(
        minutes=tuple(60 * hour + minute for hour in sorted(hours) for minute in sorted(minutes)),
        days=_numbers(day, _DAY),
        months=_numbers(month, _MONTH),
        weekdays=frozenset(number % 7 for number in _numbers(weekday, _WEEKDAY)),
        is_either=not day.startswith("*") and not weekday.startswith("*"),
    )


def _numbers(text: str, field: _Field) -> frozenset[int]:
    return frozenset(chain.from_iterable(_part(part, field) for part in text.split(",")))


def _part(text: str, field: _Field) -> range:
    """Parses one element of a list: a number, a range or `*`, each with an optional step."""
    span, slash, step_text = text.partition("/")
    step = _whole(step_text, field) if slash else 1
    if step == 0:
        raise BadCron(f"{field.name}: a step is at least 1")
    if span == "*":
        return range(field.low, field.high + 1, step)
    first, dash, last = span.partition("-")
    low = _number(first, field)
    if not dash:
        return range(low, (field.high if slash else low) + 1, step)
    high = _number(last, field)
    if field is _WEEKDAY and high == 0:
        high = 7
    if high < low:
        raise BadCron(f"{field.name}: a range goes upwards")
    return range(low, high + 1, step)


def _number(text: str, field: _Field) -> int:
    number = field.names[text] if text in field.names else _whole(text, field)
    if not field.low <= number <= field.high:
        raise BadCron(f"{field.name}: from {field.low} to {field.high}")
    return number


def _whole(text: str, field: _Field) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 4):
        raise BadCron(f"{field.name}: there is something that is no number")
    return int(text)


# Wall time: converts a local date and time to an instant, through all clock changes
# (docs/api.md, Schedules).
#
# A wall time is converted with the offset before the clock change. A wall time that the change
# skips is therefore later by the size of the change, and a wall time that occurs twice means the
# first.
#
# Zone data is constant, although it is in files. Only this module reads it, once per name, from the
# machine or else from the `tzdata` package.


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+\-]*(/[A-Za-z0-9_+\-]+)*\Z")


# Entries of the zone data that are no places: the setting of the machine, variants with leap
# seconds, and entries for the C library. Their meaning differs between machines.
_NO_ZONE = re.compile(
    r"(right/|posix/|(posixrules|localtime|factory|leapseconds)\Z)", re.IGNORECASE
)


class UnknownZone(ConveyorError):
    """This machine has no time zone of this name."""


@lru_cache(maxsize=1024)
def load_zone(name: str) -> ZoneInfo:
    if len(name) > 64 or _NAME.match(name) is None or _NO_ZONE.match(name) is not None:
        raise UnknownZone(name[:64])
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise UnknownZone(name) from None


def instant_of(local: datetime, zone: str) -> float:
    return local.replace(tzinfo=load_zone(zone), fold=0).timestamp()


def day_of(instant: float, zone: str) -> int:
    """Returns the ordinal of the local date."""
    return datetime.fromtimestamp(instant, load_zone(zone)).toordinal()


def first_after(instant: float, ordinal: int, minutes: tuple[int, ...], zone: str) -> float | None:
    """Returns the first of these minutes of one local day that is after `instant`."""
    if _clocks_change(ordinal, zone):
        instants = _instants(ordinal, minutes, zone)
        index = bisect_right(instants, instant)
        return instants[index] if index < len(instants) else None
    begin = instant_of(_midnight(ordinal), zone)
    index = bisect_right(minutes, (instant - begin) / 60)
    return begin + 60 * minutes[index] if index < len(minutes) else None


@lru_cache(maxsize=8192)
def _clocks_change(ordinal: int, zone: str) -> bool:
    midnight = _midnight(ordinal).replace(tzinfo=load_zone(zone))
    return len({(midnight + timedelta(hours=hour)).utcoffset() for hour in range(25)}) > 1


@lru_cache(maxsize=64)
def _instants(ordinal: int, minutes: tuple[int, ...], zone: str) -> tuple[float, ...]:
    """Returns sorted instants. On a day with a clock change, their order can differ from that of
    the wall times.
    """
    midnight = _midnight(ordinal)
    return tuple(
        sorted(instant_of(midnight + timedelta(minutes=minute), zone) for minute in minutes)
    )


def _midnight(ordinal: int) -> datetime:
    return datetime.combine(date.fromordinal(ordinal), time())
