"""Every mutant is a defect, of a window and an invariant, and goes away as it came."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from inspect import isclass
from typing import Any

import pytest
import trio

from conveyor.simulation.swaps import PlaceGone, setting, swapping
from tests.mutants.calls import CALLS, RecordingClient
from tests.mutants.defects import MUTANTS
from tests.mutants.domain_probes import DECISIONS
from tests.mutants.edges import EDGES
from tests.mutants.mutant import Mutant
from tests.mutants.neighbours import NEIGHBOURS
from tests.mutants.usecase_probes import DOINGS, outcome_of

every_mutant = pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)


def everything() -> dict[tuple[str, str], int]:
    """What stands in the product's modules and classes right now."""
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
    """What a mutant loads stays loaded."""
    with mutant.apply():
        pass


@every_mutant
def test_a_mutant_leaves_nothing_behind(mutant: Mutant) -> None:
    apply(mutant)
    before = everything()

    with mutant.apply():
        during = everything()

    assert during != before
    assert everything() == before


@every_mutant
async def test_a_mutant_changes_what_the_product_does(
    mutant: Mutant, autojump_clock: trio.testing.MockClock
) -> None:
    healthy = await probe(mutant)

    with mutant.apply():
        sick = await probe(mutant)

    assert sick != healthy


async def probe(mutant: Mutant) -> object:
    if mutant.name in DECISIONS:
        return DECISIONS[mutant.name]()
    if mutant.name in CALLS:
        return await CALLS[mutant.name](RecordingClient())
    return await outcome_of({**DOINGS, **EDGES, **NEIGHBOURS}[mutant.name])


@every_mutant
def test_a_mutant_says_which_window_it_opens_and_what_breaks(mutant: Mutant) -> None:
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
def test_a_mutant_whose_place_has_changed_is_an_error(
    place: str, make: Callable[[Any], Any]
) -> None:
    with pytest.raises(PlaceGone), swapping(place, make)():
        pass


def test_what_fails_under_a_mutant_leaves_nothing_behind_either() -> None:
    with pytest.raises(ZeroDivisionError), setting(f"{HERE}:HERE", "elsewhere")():
        raise ZeroDivisionError

    assert vars(sys.modules[HERE])["HERE"] == HERE
