"""Tests the profiles of simulated worlds, and how a mutant changes drawn options."""

from __future__ import annotations

import pytest

from conveyor.simulation.clients.actions import ACTIONS
from conveyor.simulation.options import draw
from conveyor.simulation.profiles import CLIENT_PROFILES, EVEN
from tests.mutants.search import fitted


@pytest.mark.parametrize("client_profile", CLIENT_PROFILES)
def test_a_temper_prefers_existing_actions_of_clients(client_profile: str) -> None:
    assert set(CLIENT_PROFILES[client_profile]) <= {action.__name__ for action in ACTIONS}


def test_every_temper_is_drawn_by_some_seed_and_half_of_the_seeds_have_none() -> None:
    drawn = [draw(seed).client_profile for seed in range(400)]

    assert set(drawn) == set(CLIENT_PROFILES)
    assert 150 < drawn.count(EVEN) < 250


def test_options_of_a_mutant_replace_drawn_ones_and_the_others_stay() -> None:
    options = draw(1)

    world = fitted(options, {"workers_count": 3, "rates": {"answer_lost": 0.5}})

    assert (world.workers_count, world.rates["answer_lost"]) == (3, 0.5)
    assert world.rates | {"answer_lost": 0.0} == options.rates | {"answer_lost": 0.0}
    assert (world.engine, world.client_speed, world.client_profile) == (
        options.engine,
        options.client_speed,
        options.client_profile,
    )


def test_faults_are_off_under_a_mutant_only_if_its_options_say_so() -> None:
    seed = next(seed for seed in range(100) if draw(seed).is_fault_free)

    assert not fitted(draw(seed), {"workers_count": 3}).is_fault_free
    assert fitted(draw(seed), {"is_fault_free": True}).rates["call_refused"] == 0.0
    assert fitted(draw(seed), {}) == draw(seed)
