"""Budgets and host limits in requests and responses (docs/api.md, Submitting lists;
docs/api.md, Budgets and host limits)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from conveyor.domain import limits
from conveyor.domain.backpressure.budget import MICROS, Budget, BudgetCap, Unit, micros_from
from conveyor.domain.backpressure.host_limit import HostLimit, HostLimits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.submit.target import BadUrl, parse_url

# Decimal text: a JSON number would become a float and lose digits. `$(?!\n)`: see `requests`.
_MONEY = r"^[0-9]{1,9}(\.[0-9]{1,6})?$(?!\n)"

Concurrency = Annotated[
    int,
    Meta(ge=1, le=limits.MAX_INFLIGHT_MAX, description="Fetches of one host at the same time."),
]
Rate = Annotated[
    float,
    Meta(
        ge=limits.HOST_RATE_MIN,
        le=limits.HOST_RATE_MAX,
        description="Fetches of one host that begin in a second.",
    ),
]


class BudgetInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The most that each run may spend: either credits, or money as decimal text."""

    credits: Annotated[int, Meta(ge=1, le=limits.BUDGET_CREDITS_MAX)] | None = None
    cost: Annotated[str, Meta(pattern=_MONEY, description="Such as 12.50.")] | None = None


class HostLimitInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The limits of one host. An omitted field means no limit."""

    concurrency: Concurrency | None = None
    rate_per_s: Rate | None = None


class HostLimitsInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The limits of each host of the job. `hosts` has exceptions for named hosts."""

    concurrency: Concurrency | None = None
    rate_per_s: Rate | None = None
    hosts: Annotated[dict[str, HostLimitInput], Meta(max_length=limits.HOST_OVERRIDES_MAX)] = {}


class BudgetResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The budget of a run and its unreserved part, both in the unit of the budget."""

    left: float
    credits: int | None = None
    cost: float | None = None


def cap_from(given: BudgetInput, *, at: str = "/budget") -> BudgetCap:
    """Returns the cap. `at` is the JSON pointer of the budget in the request."""
    if (given.credits is None) == (given.cost is None):
        raise InvalidArgument("A budget is in credits or in cost, one of them.", pointer=at)
    if given.credits is not None:
        return BudgetCap(Unit.CREDITS, given.credits)
    amount = micros_from(given.cost or "")
    if not amount:
        raise InvalidArgument("A budget is more than nothing.", pointer=f"{at}/cost")
    return BudgetCap(Unit.COST, amount)


def host_limits_from(given: HostLimitsInput | None) -> HostLimits | None:
    if given is None:
        return None
    hosts = {_host_from(name): _limit_from(limit) for name, limit in given.hosts.items()}
    every = HostLimit(given.concurrency, given.rate_per_s)
    if every == HostLimit() and not hosts:
        raise InvalidArgument("host_limits says nothing.", pointer="/host_limits")
    return HostLimits(every, hosts)


def _host_from(name: str) -> str:
    target = parse_url(f"http://{name}/")
    if isinstance(target, BadUrl) or target.port != 80 or target.path_and_query != "/":
        raise InvalidArgument("A host is a name or an address.", pointer="/host_limits/hosts")
    return target.host


def _limit_from(given: HostLimitInput) -> HostLimit:
    return HostLimit(given.concurrency, given.rate_per_s)


def cap_view(cap: BudgetCap | None) -> BudgetInput | None:
    if cap is None:
        return None
    if cap.unit is Unit.CREDITS:
        return BudgetInput(credits=cap.amount)
    return BudgetInput(cost=f"{cap.amount // MICROS}.{cap.amount % MICROS:06d}")


def budget_view(budget: Budget | None) -> BudgetResponse | None:
    if budget is None:
        return None
    if budget.unit is Unit.CREDITS:
        return BudgetResponse(left=budget.left, credits=budget.cap)
    return BudgetResponse(left=budget.left / MICROS, cost=budget.cap / MICROS)


def host_limits_view(given: HostLimits | None) -> HostLimitsInput | None:
    if given is None:
        return None
    hosts = {
        name: HostLimitInput(concurrency=limit.concurrency, rate_per_s=limit.rate_per_s)
        for name, limit in given.hosts.items()
    }
    every = given.every
    return HostLimitsInput(concurrency=every.concurrency, rate_per_s=every.rate_per_s, hosts=hosts)
