"""The program in simulated worlds: a sample, and the seeds that found something once."""

from __future__ import annotations

import os

import pytest

from conveyor.simulation.options import draw
from conveyor.simulation.simulator import Report, simulate

pytestmark = pytest.mark.slow

SEEDS_COUNT = int(os.environ.get("CONVEYOR_TEST_SEEDS", "12"))

# What each of them found is told by a test of its own; here they only have to stay well.
KEPT = [
    (1, "memory"),  # A poller crashed when it could not give its leases back.
    (5, "embedded"),  # A poller crashed when it could not learn why its queue was gone.
    (9, "embedded"),  # Discovery crashed when leases could not be counted.
    (0, "aws"),  # A mark that was taken back was read by who was behind the time.
    (1001, "aws"),  # A list that two walkers took from each other was given up.
    (1005, "aws"),  # An index showed a row twice.
]


def wrongs(report: Report) -> list[str]:
    broken = [f"{each.checker}: {each.what}" for each in report.violations]
    return broken + report.liveness_failures + report.crashes


@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_whatever_happens_every_invariant_holds_and_every_run_ends(seed: int) -> None:
    assert wrongs(simulate(draw(seed))) == []


@pytest.mark.parametrize(("seed", "engine"), KEPT)
def test_a_seed_that_found_something_finds_it_no_more(seed: int, engine: str) -> None:
    assert wrongs(simulate(draw(seed, engine=engine))) == []
