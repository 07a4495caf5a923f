"""Wall time: what instant a local date and time is, through all changes of clocks
(docs/api.md, Schedules).

A wall time is read with the offset that held before a change. So one that a change skips comes as
much later as the clocks were put forward, and one that comes twice means the first.

Zone data is a constant that happens to lie in files: it is read once by name, here and nowhere
else, from the machine's own or else from the `tzdata` package.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from conveyor.domain.errors import ConveyorError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+\-]*(/[A-Za-z0-9_+\-]+)*\Z")


# In the zone data, but no places: what a machine was set to, variants that count leap seconds, and
# entries for the C library. The same name means something else elsewhere.
_NO_ZONE = re.compile(
    r"(right/|posix/|(posixrules|localtime|factory|leapseconds)\Z)", re.IGNORECASE
)


class UnknownZone(ConveyorError):
    """No zone of this name is known here."""


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
    """The ordinal of the date that the calendar on the wall shows."""
    return datetime.fromtimestamp(instant, load_zone(zone)).toordinal()


def first_after(instant: float, ordinal: int, minutes: tuple[int, ...], zone: str) -> float | None:
    """The first instant behind this one among these minutes, in order, of one local day."""
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
    """In their own order, which on a day like this need not be that of the wall times."""
    midnight = _midnight(ordinal)
    return tuple(sorted(instant_of(midnight + timedelta(minutes=each), zone) for each in minutes))


def _midnight(ordinal: int) -> datetime:
    return datetime.combine(date.fromordinal(ordinal), time())
