"""The simulator finds every mutant: on the seed that is on record, and on demand anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutants.defects import MUTANTS
from tests.mutants.search import hunt, huntable, read_kills

KILLS = read_kills(Path(__file__).with_name("kills.json"))
SEEDS = int(os.environ.get("MUTANT_SEEDS", "0"))
TURN = int(os.environ.get("MUTANT_TURN", "4"))
"""One in so many has its turn: with 1 all of them have."""
AGAIN = 24
"""Seeds move with every change of the program: so many more are tried before that is a failure."""

slow = pytest.mark.slow


def test_a_seed_is_on_record_for_every_mutant_that_can_be_hunted() -> None:
    assert set(KILLS) == set(huntable()), "make mutants records them anew"
    assert len(KILLS) >= 30


def test_who_is_on_record_noticed_within_five_hundred_seeds() -> None:
    assert max(kill.tried for kill in KILLS.values()) <= 500
    assert {kill.window for kill in KILLS.values()} <= {
        mutant.window for mutant in MUTANTS.values()
    }


@slow
@pytest.mark.parametrize("name", list(KILLS)[::TURN])
def test_a_mutant_dies_on_its_seed_or_soon_and_the_program_lives(name: str) -> None:
    seeds = [KILLS[name].seed, *range(AGAIN)]

    assert hunt(name, seeds) is not None, "the seeds have moved: make mutants records them anew"


@slow
@pytest.mark.skipif(not SEEDS, reason="MUTANT_SEEDS says how many seeds each may take")
@pytest.mark.parametrize("name", huntable())
def test_a_mutant_is_found_by_hunting(name: str) -> None:
    assert hunt(name, range(SEEDS)) is not None
