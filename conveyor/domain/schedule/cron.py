"""Cron expressions: parses the five fields into sets of numbers
(docs/api.md, Schedules)."""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from itertools import chain
from typing import NamedTuple
from zoneinfo import ZoneInfo

from conveyor.domain.errors import ConveyorError

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
        minutes=tuple(60 * each + minute for each in sorted(hours) for minute in sorted(minutes)),
        days=_numbers(day, _DAY),
        months=_numbers(month, _MONTH),
        weekdays=frozenset(each % 7 for each in _numbers(weekday, _WEEKDAY)),
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
    return tuple(sorted(instant_of(midnight + timedelta(minutes=each), zone) for each in minutes))


def _midnight(ordinal: int) -> datetime:
    return datetime.combine(date.fromordinal(ordinal), time())
