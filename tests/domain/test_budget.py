"""Budgets: amounts of money, which calls can be paid for, and the changes that move amounts."""

from __future__ import annotations

import pytest

from conveyor.domain.backpressure import reservation
from conveyor.domain.budget import Price, Unit, micros_from
from conveyor.domain.changes import ANY, Guard, Insert, Update
from tests.builders import a_share


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("0", 0),
        ("12.50", 12_500_000),
        ("0.000276", 276),
        ("0.0000001", 1),
        ("1e-3", 1_000),
        ("999999999.999999", 999_999_999_999_999),
    ],
)
def test_money_is_parsed_exactly_and_rounded_up(text: str, micros: int) -> None:
    assert micros_from(text) == micros


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "nan", "inf", "1e9", "1,5", "0x10", "1_0", " 1", "+1", "\u0661", "0" * 41],
)
def test_text_that_is_not_a_plain_amount_is_not_parsed(text: str) -> None:
    assert micros_from(text) is None


@pytest.mark.parametrize(
    ("prices", "room", "paid"),
    [
        ([5, 5, 5], 10, [True, True, False]),
        ([25, 1, 5], 6, [False, True, True]),
        ([0, 7], 0, [True, False]),
        ([], 3, []),
    ],
)
def test_calls_are_paid_for_in_order_while_the_budget_has_room(
    prices: list[int], room: int, paid: list[bool]
) -> None:
    assert reservation.affordable(prices, room) == paid


def test_a_reservation_grows_under_its_sequence_number_only_if_the_budget_has_enough_left() -> None:
    share, budget = reservation.resize(a_share(taken=10, seq=3), taken=35).writes

    assert isinstance(share, Update)
    assert isinstance(budget, Update)
    assert (share.guard, share.values) == (Guard(equals=(("seq", 3),)), {"taken": 35, "seq": 4})
    assert (budget.guard, budget.deltas) == (Guard(at_least=("left", 25)), {"left": -25})


def test_returning_an_amount_to_the_budget_is_never_refused() -> None:
    _, budget = reservation.resize(a_share(taken=35, seq=4), taken=10).writes

    assert isinstance(budget, Update)
    assert (budget.guard, budget.deltas) == (ANY, {"left": 25})


def test_a_forced_resize_takes_from_the_budget_without_a_condition() -> None:
    _, budget = reservation.force_resize(a_share(taken=10), taken=40).writes

    assert isinstance(budget, Update)
    assert (budget.guard, budget.deltas) == (ANY, {"left": -30})


def test_the_first_resize_inserts_the_reservation() -> None:
    share, _ = reservation.resize(a_share(seq=0), taken=5).writes

    assert isinstance(share, Insert)
    assert share.row == a_share(taken=5, seq=1)


def test_a_price_is_stated_in_the_unit_of_the_budget() -> None:
    price = Price(credits=25, cost_micros=6_900)

    assert (price.in_unit(Unit.CREDITS), price.in_unit(Unit.COST)) == (25, 6_900)
