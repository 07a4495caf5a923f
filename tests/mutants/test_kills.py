"""Tests that the simulator finds every mutant, on its recorded seed or in a new hunt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutants.defects import MUTANTS
from tests.mutants.search import hunt, huntable, read_kills

KILLS = read_kills(Path(__file__).with_name("kills.json"))
SEEDS = int(os.environ.get("MUTANT_SEEDS", "0"))
TURN = int(os.environ.get("MUTANT_TURN", "4"))
"""One in TURN mutants is tested in a run; 1 tests all of them."""
AGAIN = 24
"""A change of the program changes what a seed does, so this many other seeds are tried."""

slow = pytest.mark.slow


def test_a_seed_is_on_record_for_every_mutant_that_can_be_hunted() -> None:
    assert set(KILLS) == set(huntable()), "make mutants records them anew"
    assert len(KILLS) >= 30


def test_every_recorded_kill_took_at_most_five_hundred_seeds() -> None:
    assert max(kill.tried for kill in KILLS.values()) <= 500
    assert {kill.window for kill in KILLS.values()} <= {
        mutant.window for mutant in MUTANTS.values()
    }


@slow
@pytest.mark.parametrize("name", list(KILLS)[::TURN])
def test_the_recorded_seed_or_one_of_a_few_others_kills_the_mutant(name: str) -> None:
    seeds = [KILLS[name].seed, *range(AGAIN)]

    assert hunt(name, seeds) is not None, "the seeds have moved: make mutants records them anew"


@slow
@pytest.mark.skipif(not SEEDS, reason="MUTANT_SEEDS says how many seeds each may take")
@pytest.mark.parametrize("name", huntable())
def test_hunting_finds_the_mutant(name: str) -> None:
    assert hunt(name, range(SEEDS)) is not None
