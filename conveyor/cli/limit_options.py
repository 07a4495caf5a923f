"""The options that limit a job: its budget, and its concurrency and rate per host."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import click

from conveyor.domain import limits
from conveyor.schemas.requests import BudgetInput, HostLimitsInput

F = TypeVar("F", bound=Callable[..., Any])

# Money has up to 9 digits and 6 decimals, as in the API.
_CREDITS = re.compile(r"credits=([1-9][0-9]{0,11})\Z")
_COST = re.compile(r"cost=([0-9]{1,9}(?:\.[0-9]{1,6})?)\Z")


class LimitOptions(TypedDict):
    """The options as click passes them."""

    budget: BudgetInput | None
    per_host: int | None
    rate: float | None


def budget_from(text: str) -> BudgetInput:
    """Parses `credits=1000` or `cost=12.50`."""
    if match := _CREDITS.match(text):
        return BudgetInput(credits=int(match[1]))
    if match := _COST.match(text):
        return BudgetInput(cost=match[1])
    problem = f"{text!r} is not credits=N or cost=N.NN."
    raise click.BadParameter(problem, param_hint="'--budget'")


def limit_options(command: F) -> F:
    """Adds --budget, --per-host and --rate."""
    options = (
        click.option(
            "--budget",
            type=budget_from,
            metavar="UNIT=AMOUNT",
            help="The most to spend: credits=1000, or cost=12.50.",
        ),
        click.option(
            "--per-host",
            type=click.IntRange(1, limits.MAX_INFLIGHT_MAX),
            help="Pages of one host in flight at once.",
        ),
        click.option(
            "--rate",
            type=click.FloatRange(limits.HOST_RATE_MIN, limits.HOST_RATE_MAX),
            help="Pages of one host that start in a second.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def host_limits(per_host: int | None, rate: float | None) -> HostLimitsInput | None:
    if per_host is None and rate is None:
        return None
    return HostLimitsInput(concurrency=per_host, rate_per_s=rate)
