"""Cron expressions: what each notation of a field means, and what is refused."""

from __future__ import annotations

from datetime import date

import pytest

from conveyor.domain.schedule import BadCron, parse_cron


@pytest.mark.parametrize(
    ("field", "minutes"),
    [
        ("7", [7]),
        ("1,5,3,5", [1, 3, 5]),
        ("10-13", [10, 11, 12, 13]),
        ("10-20/4", [10, 14, 18]),
        ("*/20", [0, 20, 40]),
        ("50/4", [50, 54, 58]),
        ("0,30-31,*/25", [0, 25, 30, 31, 50]),
    ],
)
def test_a_field_lists_numbers_ranges_and_steps(field: str, minutes: list[int]) -> None:
    assert list(parse_cron(f"{field} 0 * * *").minutes) == minutes


def test_minutes_of_the_day_are_listed_in_order() -> None:
    assert parse_cron("30,0 9,8 * * *").minutes == (480, 510, 540, 570)


@pytest.mark.parametrize(
    ("field", "weekdays"),
    [
        ("0", {0}),
        ("7", {0}),
        ("sun", {0}),
        ("MON-Fri", {1, 2, 3, 4, 5}),
        ("fri-sun", {5, 6, 0}),
        ("5-7", {5, 6, 0}),
        ("sun-tue", {0, 1, 2}),
        ("*/3", {0, 3, 6}),
    ],
)
def test_weekdays_have_names_and_sunday_has_two_numbers(field: str, weekdays: set[int]) -> None:
    assert parse_cron(f"0 0 * * {field}").weekdays == weekdays


def test_months_have_names() -> None:
    assert parse_cron("0 0 * jan,nov-dec *").months == {1, 11, 12}


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ("0 0 1 * *", [True, False, False]),
        ("0 0 * * mon", [False, True, False]),
        ("0 0 1 * mon", [True, True, False]),
        ("0 0 1 2 mon", [False, False, False]),
        ("0 0 */2 * mon", [False, False, False]),
        ("0 0 2-9 * */2", [False, False, True]),
    ],
)
def test_a_day_matches_if_either_day_field_does(expression: str, fits: list[bool]) -> None:
    thursday_1st, monday_12th, tuesday_6th = date(2026, 1, 1), date(2026, 1, 12), date(2026, 1, 6)

    table = parse_cron(expression)

    assert [table.matches(day) for day in (thursday_1st, monday_12th, tuesday_6th)] == fits


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "* * * *",
        "* * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * 32 * *",
        "* * * 13 *",
        "* * * * 8",
        "5-3 * * * *",
        "*/0 * * * *",
        "a * * * *",
        "1,,2 * * * *",
        "-1 * * * *",
        "1- * * * *",
        "*/ * * * *",
        "\u0661 * * * *",
        "mon * * * *",
        "* * * fri *",
        "1.5 * * * *",
        "00001 * * * *",
    ],
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(BadCron):
        parse_cron(expression)
