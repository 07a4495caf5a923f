"""The simulator finds every mutant: on the seed that is on record, and on demand anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conveyor.simulation.mutants import MUTANTS
from conveyor.simulation.mutants.hunting import (
    cause_of,
    hunt,
    huntable,
    is_well_without,
    read_kills,
    run_mutant,
)

KILLS = read_kills(Path(__file__).with_name("kills.json"))
SEEDS = int(os.environ.get("MUTANT_SEEDS", "0"))
TURN = int(os.environ.get("MUTANT_TURN", "0"))
"""One in so many has its turn: with 1 all of them have, without it none."""
AT_LARGE = frozenset(
    {
        "last_answer_stands",
        "upload_not_pinned",
        "resumed_list_renumbered",
        "failed_ingest_leaves_run",
        "add_after_close",
        "sweeper_does_not_look",
        "sweeper_sees_its_first_page",
        "discovery_looks_back_never",
        "settle_under_any_claim",
        "settle_through_shut_gates",
        "lost_workers_not_counted",
        "body_named_by_task",
        "beat_renews_lease_only",
        "gates_left_open",
        "two_live_runs",
        "rerun_of_what_was_ingested",
        "ancestors_deleted",
        "one_scrub_only",
        "exports_share_a_place",
        "export_unfenced",
        "chunk_counted_again",
        "count_apart_from_flip",
        "leftovers_of_a_read_dropped",
        "rows_read_as_they_come",
        "page_drops_a_shard",
        "scrub_of_one_shard",
        "lost_refs_stay_lost",
        "lease_released_by_anybody",
    }
)
"""Not hunted long enough yet. `make mutants` finds them, and then they do not belong here."""

slow = pytest.mark.slow


def test_a_seed_is_on_record_for_every_mutant_that_can_be_hunted() -> None:
    assert set(KILLS) == set(huntable()) - AT_LARGE, "make mutants records them anew"
    assert len(KILLS) >= 30


def test_who_is_on_record_noticed_within_five_hundred_seeds() -> None:
    assert max(kill.tried for kill in KILLS.values()) <= 500
    assert {kill.window for kill in KILLS.values()} <= {each.window for each in MUTANTS.values()}


@slow
@pytest.mark.parametrize("name", list(KILLS)[::TURN] if TURN else [])
def test_a_mutant_dies_on_its_seed_and_the_program_lives(name: str) -> None:
    seed = KILLS[name].seed

    report = run_mutant(name, seed)

    assert cause_of(report) is not None, "the seeds have moved: make mutants records them anew"
    assert is_well_without(name, seed)


@slow
@pytest.mark.skipif(not SEEDS, reason="MUTANT_SEEDS says how many seeds each may take")
@pytest.mark.parametrize("name", huntable())
def test_a_mutant_is_found_by_hunting(name: str) -> None:
    assert hunt(name, range(SEEDS)) is not None
