"""Budgets of runs, their reservations by pollers, and prices of calls (SPEC.md 4.9;
docs/storage.md, Rows)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum

import msgspec

from conveyor.domain.ids import JobId, RunId

# Money is stored as an integer of millionths: sums of floats would drift.
MICROS = 1_000_000
_COST_MAX = Decimal(10**9)
_AMOUNT = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?")
_AMOUNT_CHARS_MAX = 40


class Unit(StrEnum):
    """The unit of a budget: credits, or millionths of the gateway's currency."""

    CREDITS = "credits"
    COST = "cost"


class BudgetCap(msgspec.Struct, frozen=True):
    """The most that each run of a job may spend."""

    unit: Unit  #: credits or cost.
    amount: int  #: Credits, or millionths of money.


class Budget(msgspec.Struct, frozen=True):
    """The budget of one run. `left` is the part that no poller has reserved."""

    job_id: JobId  #: The job of the budget.
    run_id: RunId  #: The run of the budget.
    unit: Unit  #: credits or cost.
    cap: int  #: The most that the run may spend, in credits or millionths.
    #: The part that no poller has reserved; negative only if a call cost more than its price.
    left: int


class BudgetReservation(msgspec.Struct, frozen=True):
    """The part of a run's budget that one poller has spent or reserved. It never spends more.

    `seq` counts the changes. A change with an unknown outcome cannot be applied after the next one.
    """

    job_id: JobId  #: The job of the reservation.
    run_id: RunId  #: The run of the reservation.
    holder: str  #: The poller that holds it: a ULID of its own.
    taken: int  #: Reserved and not returned; the holder never spends more.
    seq: int  #: Number of the latest change.


class Price(msgspec.Struct, frozen=True):
    """The most that one call may cost. `cost_micros` is None if the gateway has no prices."""

    credits: int = 0
    cost_micros: int | None = 0

    def in_unit(self, unit: Unit) -> int:
        if unit is Unit.CREDITS:
            return self.credits
        assert self.cost_micros is not None, "a budget in money, and a gateway without prices"
        return self.cost_micros


def micros_from(text: str) -> int | None:
    """Converts decimal text to millionths, rounded up; None if it is no valid amount."""
    # `Decimal` also takes underscores, spaces and the digits of other scripts.
    if len(text) > _AMOUNT_CHARS_MAX or not _AMOUNT.fullmatch(text):
        return None
    amount = Decimal(text)
    if amount >= _COST_MAX:
        return None
    return int((amount * MICROS).to_integral_value(ROUND_CEILING))


# Prices of a page at a ZenRows-compatible gateway, in credits (docs/api.md, Dry run).
#
# Each page is counted once. The gateway does not charge failed calls, so retries do not count.


# Plain, with JavaScript rendering, with a premium proxy, with both.
_PLAIN, _RENDERED, _PREMIUM, _BOTH = 1, 5, 10, 25


class PriceRange(msgspec.Struct, frozen=True):
    """The least and the most credits. They are equal unless the gateway chooses the mode."""

    credits_min: int = 0
    credits_max: int = 0

    def __add__(self, other: PriceRange) -> PriceRange:
        return PriceRange(
            self.credits_min + other.credits_min, self.credits_max + other.credits_max
        )


FREE = PriceRange()


def price_of(params: Mapping[str, str]) -> PriceRange:
    """Returns the price of one page with these parameters."""
    if params.get("mode") == "auto":
        return PriceRange(_PLAIN, _BOTH)
    is_rendered = params.get("js_render", "").lower() == "true"
    is_premium = params.get("premium_proxy", "").lower() == "true"
    price = {
        (False, False): _PLAIN,
        (True, False): _RENDERED,
        (False, True): _PREMIUM,
        (True, True): _BOTH,
    }[is_rendered, is_premium]
    return PriceRange(price, price)
