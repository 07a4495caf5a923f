"""Nominal times of schedules, compared with a walk through every minute of UTC, and edge cases."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.schedule import (
    WEEKDAYS,
    At,
    BadRule,
    Calendar,
    Cron,
    Rate,
    RateUnit,
    Rule,
    UnknownZone,
    check_rule,
    load_zone,
    next_after,
    upcoming,
    upcoming_times,
)
from tests.builders import T0, a_schedule

# Clock changes of an hour, half an hour, two hours and a whole day, at midnight, in both
# hemispheres, and twice within a month; and zones without changes.
ZONES = (
    "Africa/Casablanca",
    "America/Havana",
    "America/New_York",
    "America/Santiago",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Europe/Berlin",
    "Europe/Dublin",
    "Pacific/Apia",
    "Pacific/Chatham",
    "UTC",
)
MINUTE = timedelta(minutes=1)
HOURS = 4 * 24

Minutes = list[tuple[float, datetime]]
Matches = Callable[[datetime], bool]


@cache
def changes_of(zone: str, year: int) -> tuple[datetime, ...]:
    """The hours of this year in which the zone's clocks change."""
    start, info = datetime(year, 1, 1, tzinfo=UTC), ZoneInfo(zone)
    hours = [start + timedelta(hours=hour) for hour in range(366 * 24)]
    offsets = [hour.astimezone(info).utcoffset() for hour in hours]
    return tuple(hours[n] for n in range(1, len(hours)) if offsets[n] != offsets[n - 1])


def walk(start: datetime, zone: str) -> Minutes:
    """Every minute of some days with the local time, looked up and never computed."""
    info = ZoneInfo(zone)
    instants = (start + n * MINUTE for n in range(HOURS * 60))
    return [(at.timestamp(), at.astimezone(info).replace(tzinfo=None)) for at in instants]


def expected(minutes: Minutes, matches: Matches) -> list[float]:
    """The first instant of every matching local time. For a local time that is skipped: the instant
    later by the amount that the clocks were set forward."""
    by_local_time: dict[datetime, float] = {}
    instants: set[float] = set()
    for at, wall in minutes:
        if wall not in by_local_time:
            by_local_time[wall] = at
            if matches(wall):
                instants.add(at)
    for (_, before), (after_at, after) in pairwise(minutes):
        lost = (after - before) // MINUTE - 1
        for ahead in range(lost):
            if matches(before + (1 + ahead) * MINUTE):
                instants.add(after_at + 60 * ahead)
    return sorted(instants)


def all_between(rule: Rule, after: float, until: float) -> Iterator[float]:
    at = next_after(rule, after)
    while at is not None and at <= until:
        yield at
        at = next_after(rule, at)


@st.composite
def windows(draw: st.DrawFn) -> tuple[str, datetime]:
    """Some days in some zone: around a change of clocks, at the end of a month, or anywhere."""
    zone, year = draw(st.sampled_from(ZONES)), draw(st.integers(2004, 2036))
    corners = [datetime(year, month, 27, tzinfo=UTC) for month in (1, 2, 4, 12)]
    near = [change - timedelta(days=2) for change in changes_of(zone, year)]
    start = draw(st.sampled_from([*corners, *near * 3]))
    return zone, start + timedelta(hours=draw(st.integers(-20, 20)))


minutes_of_day = st.one_of(
    st.frozensets(st.integers(0, 24 * 60 - 1), min_size=1, max_size=6),
    st.frozensets(st.integers(0, 4 * 60), min_size=1, max_size=12),
)


def minute_of(wall: datetime) -> int:
    return 60 * wall.hour + wall.minute


@st.composite
def calendars(draw: st.DrawFn, zone: str) -> tuple[Rule, Matches]:
    minutes = draw(minutes_of_day)
    times = tuple(f"{minute // 60:02}:{minute % 60:02}" for minute in minutes)
    match draw(st.sampled_from(["daily", "weekly", "monthly"])):
        case "weekly":
            names = draw(st.frozensets(st.sampled_from(WEEKDAYS), min_size=1))
            weekly = Calendar(times, zone, weekdays=tuple(names))
            return (
                weekly,
                lambda wall: minute_of(wall) in minutes and wall.strftime("%a").lower() in names,
            )
        case "monthly":
            days = draw(st.frozensets(st.integers(1, 31), min_size=1, max_size=20))
            monthly = Calendar(times, zone, month_days=tuple(days))
            return monthly, lambda wall: minute_of(wall) in minutes and wall.day in days
    return Calendar(times, zone), lambda wall: minute_of(wall) in minutes


@st.composite
def crons(draw: st.DrawFn, zone: str) -> tuple[Rule, Matches]:
    minutes = draw(st.frozensets(st.integers(0, 59), min_size=1, max_size=3))
    hours = draw(st.frozensets(st.integers(0, 23), min_size=1, max_size=6) | st.just(range(24)))
    days = draw(st.none() | st.frozensets(st.integers(1, 31), min_size=1, max_size=20))
    weekdays = draw(st.none() | st.frozensets(st.integers(0, 6), min_size=1, max_size=3))
    fields = [
        ",".join(map(str, minutes)),
        "*" if len(hours) == 24 else ",".join(map(str, hours)),
        "*" if days is None else ",".join(map(str, days)),
        "*",
        "*" if weekdays is None else ",".join(map(str, weekdays)),
    ]

    def matches(wall: datetime) -> bool:
        if wall.minute not in minutes or wall.hour not in hours:
            return False
        fits = [wall.day in days] if days is not None else []
        fits += [int(wall.strftime("%w")) in weekdays] if weekdays is not None else []
        return any(fits) if fits else True

    return Cron(" ".join(fields), zone), matches


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), windows())
def test_a_local_time_fires_when_it_first_occurs_or_when_it_would_have_occurred(
    data: st.DataObject, window: tuple[str, datetime]
) -> None:
    zone, start = window
    rule, matches = data.draw(st.one_of(calendars(zone), crons(zone)))
    minutes = walk(start, zone)
    # A clock change before the walk may affect its first day.
    first, last = minutes[26 * 60][0], minutes[-1][0]

    instants = list(all_between(rule, first, last))

    assert instants == [at for at in expected(minutes, matches) if at > first]


@pytest.mark.slow
def test_only_the_zones_without_clock_changes_have_none_in_the_walk() -> None:
    changing = {zone for zone in ZONES if any(changes_of(zone, year) for year in (2011, 2017))}

    assert set(ZONES) - changing == {"Asia/Kathmandu", "UTC"}


def utc(text: str) -> float:
    return datetime.fromisoformat(text + "+00:00").timestamp()


def times(rule: Rule, after: str, count: int) -> list[str]:
    instants, at = [], utc(after)
    for _ in range(count):
        following = next_after(rule, at)
        if following is None:
            break
        at = following
        instants.append(datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M"))
    return instants


def test_a_local_time_skipped_in_spring_fires_an_hour_later() -> None:
    rule = Calendar(("02:30",), "Europe/Berlin")

    assert times(rule, "2026-03-28T00:00", 3) == [
        "2026-03-28 01:30",
        "2026-03-29 01:30",  # 03:30 local time
        "2026-03-30 00:30",
    ]


def test_two_local_times_that_spring_makes_one_instant_fire_once() -> None:
    rule = Calendar(("02:30", "03:30"), "Europe/Berlin")

    assert times(rule, "2026-03-29T00:00", 2) == ["2026-03-29 01:30", "2026-03-30 00:30"]


def test_a_local_time_repeated_in_autumn_fires_the_first_time() -> None:
    rule = Cron("30 2 * * *", "Europe/Berlin")

    assert times(rule, "2026-10-24T12:00", 2) == ["2026-10-25 00:30", "2026-10-26 01:30"]


def test_a_skipped_day_fires_with_the_next_day() -> None:
    rule = Calendar(("09:00",), "Pacific/Apia")

    assert times(rule, "2011-12-29T00:00", 3) == [
        "2011-12-29 19:00",
        "2011-12-30 19:00",  # 31 December local time, and 30 December, which was skipped
        "2011-12-31 19:00",
    ]


def test_a_time_that_a_clock_change_moves_past_midnight_still_fires() -> None:
    rule = Calendar(("09:00",), "Pacific/Apia", month_days=(30,))
    early_on_the_31st = "2011-12-30T15:00"

    assert times(rule, early_on_the_31st, 2) == ["2011-12-30 19:00", "2012-01-29 19:00"]


@pytest.mark.parametrize(
    ("rule", "days"),
    [
        (
            Calendar(("00:00",), "UTC", month_days=(31,)),
            ["2026-03-31", "2026-05-31", "2026-07-31", "2026-08-31"],
        ),
        (Cron("0 0 29 2 *", "UTC"), ["2028-02-29", "2032-02-29"]),
        (Cron("0 0 30 4,2 *", "UTC"), ["2026-04-30", "2027-04-30"]),
        (Cron("0 0 13 * fri", "UTC"), ["2026-02-20", "2026-02-27", "2026-03-06", "2026-03-13"]),
        (Cron("0 0 */2 * mon", "UTC"), ["2026-02-23", "2026-03-09", "2026-03-23"]),
    ],
)
def test_a_day_that_a_month_lacks_is_left_out(rule: Rule, days: list[str]) -> None:
    instants = times(rule, "2026-02-13T12:00", len(days))

    assert instants == [f"{day} 00:00" for day in days]


def test_a_leap_day_is_found_across_a_century_without_one() -> None:
    rule = Cron("0 0 29 2 *", "UTC")

    assert times(rule, "2096-03-01T00:00", 1) == ["2104-02-29 00:00"]


@pytest.mark.parametrize("cron", ["0 0 30 2 *", "0 0 31 4,6,9,11 *"])
def test_a_day_that_no_month_has_never_fires(cron: str) -> None:
    assert next_after(Cron(cron, "UTC"), T0) is None


def test_a_rate_counts_from_its_anchor_whatever_the_local_clock_does() -> None:
    rule = Rate(90, RateUnit.MINUTE, utc("2026-03-29T00:00"))

    assert times(rule, "2026-03-01T00:00", 1) == ["2026-03-29 01:30"]
    assert times(rule, "2026-03-29T01:30", 2) == ["2026-03-29 03:00", "2026-03-29 04:30"]
    assert times(Rate(2, RateUnit.DAY, utc("2026-03-28T12:00")), "2026-03-29T00:00", 1) == [
        "2026-03-30 12:00"
    ]


def test_an_at_rule_fires_once() -> None:
    rule = At("2026-09-01T09:00:30", "Europe/Berlin")

    assert list(all_between(rule, utc("2026-01-01T00:00"), utc("2027-01-01T00:00"))) == [
        utc("2026-09-01T07:00:30")
    ]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10_000), st.sampled_from(RateUnit), st.integers(0, 10**8))
def test_a_rate_fires_at_the_next_multiple_of_its_period(
    every: int, unit: RateUnit, ahead: int
) -> None:
    rule = Rate(every, unit, T0)

    instants = next_after(rule, T0 + ahead)

    period_s = every * {"minute": 60, "hour": 3600, "day": 86400}[unit]
    assert instants is not None
    assert (instants - T0) % period_s == 0
    assert 0 < instants - (T0 + ahead) <= period_s


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (Calendar(("09:00",), "Europe/Bonn"), "timezone"),
        (Calendar(("09:00",), "../../etc/passwd"), "timezone"),
        (Calendar(("09:00",), "/etc/localtime"), "timezone"),
        (Calendar(("09:00",), "Europe"), "timezone"),
        (Calendar(("09:00",), ""), "timezone"),
        (Calendar(("09:00",), "UTC\n"), "timezone"),
        (At("2026-02-30T09:00", "UTC"), "at"),
        (At("2026-02-01T24:30", "UTC"), "at"),
        (Cron("* * * *", "UTC"), "cron"),
    ],
)
def test_an_invalid_rule_is_refused_with_the_field_at_fault(rule: Rule, field: str) -> None:
    with pytest.raises(BadRule) as refused:
        check_rule(rule)

    assert refused.value.field == field


def test_zones_are_known_on_a_machine_without_zone_data() -> None:
    zoneinfo.reset_tzpath(to=())
    ZoneInfo.clear_cache()
    load_zone.cache_clear()
    try:
        assert load_zone("Europe/Berlin").key == "Europe/Berlin"
    finally:
        zoneinfo.reset_tzpath()


def test_an_overdue_schedule_shows_its_due_time_and_a_paused_one_the_next() -> None:
    active = a_schedule()
    paused = a_schedule(status="paused")

    assert upcoming(active, T0) == upcoming(paused, T0) == T0 + 3600
    assert upcoming(active, T0 + 4000) == T0 + 3600
    assert upcoming(paused, T0 + 4000) == T0 + 7200
    assert upcoming(a_schedule(next_fire_at=None), T0) is None


def test_the_walk_has_a_skipped_and_a_repeated_hour() -> None:
    spring = walk(datetime(2026, 3, 28, tzinfo=UTC), "Europe/Berlin")
    autumn = walk(datetime(2026, 10, 24, tzinfo=UTC), "Europe/Berlin")
    lost, doubled = (datetime.fromisoformat(f"2026-{day}T02:30") for day in ("03-29", "10-25"))

    assert [wall for _, wall in spring].count(lost) == 0
    assert [wall for _, wall in autumn].count(doubled) == 2
    assert {wall.date() for _, wall in spring} >= {date(2026, 3, 29), date(2026, 3, 30)}


@pytest.mark.parametrize(
    "name", ["right/UTC", "posix/Europe/Berlin", "posixrules", "localtime", "Factory", "RIGHT/utc"]
)
def test_names_in_the_zone_data_that_are_no_places_are_unknown(name: str) -> None:
    with pytest.raises(UnknownZone):
        load_zone(name)


def test_the_next_times_are_consecutive() -> None:
    hourly = a_schedule(next_fire_at=T0 + 3600)

    assert upcoming_times(hourly, T0) == [T0 + 3600 * number for number in range(1, 6)]


def test_upcoming_times_that_have_passed_while_a_fire_is_due_are_not_shown() -> None:
    hourly = a_schedule(next_fire_at=T0 + 3600)

    assert upcoming_times(hourly, T0 + 8000)[:2] == [T0 + 3600, T0 + 10800]


def test_a_rule_without_a_second_time_soon_shows_at_most_one() -> None:
    leap_day = Cron(cron="0 0 29 2 *", timezone="UTC")
    once = At(at="2023-11-15T00:00:00", timezone="UTC")

    for rule in (leap_day, once):
        first_at = next_after(rule, T0)
        assert upcoming_times(a_schedule(rule=rule, next_fire_at=first_at), T0) == [first_at]
    assert upcoming_times(a_schedule(next_fire_at=None), T0) == []


def test_the_last_day_of_each_month_is_shown() -> None:
    rule = Cron(cron="0 0 31 * *", timezone="UTC")
    schedule = a_schedule(rule=rule, next_fire_at=next_after(rule, T0))

    days = [datetime.fromtimestamp(at, UTC).date() for at in upcoming_times(schedule, T0)]

    assert [(day.month, day.day) for day in days] == [(12, 31), (1, 31), (3, 31), (5, 31), (7, 31)]
