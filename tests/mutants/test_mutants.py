"""Tests every mutant: it changes behaviour, names what it breaks, and undoes its swaps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from inspect import isclass
from typing import Any

import pytest
import trio

from conveyor.simulation.swaps import SwapTargetMissing, swap, swap_constant
from tests.mutants.calls import AWS_PROBES, RecordingClient
from tests.mutants.defects import MUTANTS
from tests.mutants.domain_probes import DOMAIN_PROBES
from tests.mutants.edges import EDGE_PROBES
from tests.mutants.mutant import Mutant
from tests.mutants.neighbours import NEIGHBOUR_PROBES
from tests.mutants.usecase_probes import USE_CASE_PROBES, outcome_of

every_mutant = pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)


def attribute_ids() -> dict[tuple[str, str], int]:
    """Returns the ids of all attributes of the product's modules and classes."""
    kills: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("conveyor.", "actors.")):
            continue
        for key, value in list(vars(module).items()):
            kills[name, key] = id(value)
            if isclass(value) and value.__module__ == name:
                kills |= {
                    (name, f"{key}.{attribute}"): id(it) for attribute, it in vars(value).items()
                }
    return kills


def apply(mutant: Mutant) -> None:
    """Applies the mutant once, because modules that it imports stay imported."""
    with mutant.apply():
        pass


@every_mutant
def test_a_mutant_restores_every_attribute(mutant: Mutant) -> None:
    apply(mutant)
    before = attribute_ids()

    with mutant.apply():
        during = attribute_ids()

    assert during != before
    assert attribute_ids() == before


@every_mutant
async def test_a_mutant_changes_the_result_of_its_probe(
    mutant: Mutant, autojump_clock: trio.testing.MockClock
) -> None:
    normal = await probe(mutant)

    with mutant.apply():
        mutated = await probe(mutant)

    assert mutated != normal


async def probe(mutant: Mutant) -> object:
    if mutant.name in DOMAIN_PROBES:
        return DOMAIN_PROBES[mutant.name]()
    if mutant.name in AWS_PROBES:
        return await AWS_PROBES[mutant.name](RecordingClient())
    return await outcome_of({**USE_CASE_PROBES, **EDGE_PROBES, **NEIGHBOUR_PROBES}[mutant.name])


@every_mutant
def test_a_mutant_names_its_failure_mode_and_its_invariants(mutant: Mutant) -> None:
    assert 1 <= mutant.window <= 130
    assert mutant.invariants
    assert all(1 <= invariant <= 66 for invariant in mutant.invariants)
    assert re.fullmatch(r"[A-Z].*\.", mutant.what)


def one(first: int, *, second: int = 2) -> int:
    return first + second


async def waiting(first: int, *, second: int = 2) -> int:
    return first + second


def other(first: int) -> int:
    return first


HERE = __name__


@pytest.mark.parametrize(
    ("place", "make"),
    [
        (f"{HERE}:gone", lambda _: one),
        (f"{HERE}:Mutant.gone", lambda _: one),
        ("conveyor.gone:thing", lambda _: one),
        (f"{HERE}:one", lambda _: other),
        (f"{HERE}:one", lambda _: waiting),
        (f"{HERE}:HERE", lambda _: 3),
    ],
)
def test_swapping_a_missing_or_changed_attribute_is_an_error(
    place: str, make: Callable[[Any], Any]
) -> None:
    with pytest.raises(SwapTargetMissing), swap(place, make)():
        pass


def test_a_failure_under_a_mutant_restores_every_attribute() -> None:
    with pytest.raises(ZeroDivisionError), swap_constant(f"{HERE}:HERE", "elsewhere")():
        raise ZeroDivisionError

    assert vars(sys.modules[HERE])["HERE"] == HERE
