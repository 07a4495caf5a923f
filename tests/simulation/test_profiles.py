"""Moods: what worlds are like as a whole, and what a hunt makes of them."""

from __future__ import annotations

import pytest

from conveyor.simulation.clients.actions import ACTIONS
from conveyor.simulation.options import draw
from conveyor.simulation.profiles import EVEN, TEMPERS
from tests.mutants.search import fitted


@pytest.mark.parametrize("temper", TEMPERS)
def test_a_temper_is_about_what_clients_do(temper: str) -> None:
    assert set(TEMPERS[temper]) <= {action.__name__ for action in ACTIONS}


def test_every_temper_is_that_of_some_seed_and_half_of_them_have_none() -> None:
    drawn = [draw(seed).temper for seed in range(400)]

    assert set(drawn) == set(TEMPERS)
    assert 150 < drawn.count(EVEN) < 250


def test_a_world_is_made_to_fit_and_the_rest_is_the_seeds() -> None:
    options = draw(1)

    world = fitted(options, {"workers_count": 3, "rates": {"answer_lost": 0.5}})

    assert (world.workers_count, world.rates["answer_lost"]) == (3, 0.5)
    assert world.rates | {"answer_lost": 0.0} == options.rates | {"answer_lost": 0.0}
    assert (world.engine, world.haste, world.temper) == (
        options.engine,
        options.haste,
        options.temper,
    )


def test_a_world_that_fits_is_spared_only_if_it_says_so() -> None:
    seed = next(seed for seed in range(100) if draw(seed).is_spared)

    assert not fitted(draw(seed), {"workers_count": 3}).is_spared
    assert fitted(draw(seed), {"is_spared": True}).rates["call_refused"] == 0.0
    assert fitted(draw(seed), {}) == draw(seed)
