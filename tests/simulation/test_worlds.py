"""The program in simulated worlds: a sample, and the seeds that found something once."""

from __future__ import annotations

import os

import pytest

from conveyor.simulation.options import draw
from conveyor.simulation.simulator import Report, simulate

pytestmark = pytest.mark.slow

SEEDS_COUNT = int(os.environ.get("CONVEYOR_TEST_SEEDS", "12"))

# What each of them found is told by a test of its own; here they only have to stay well. Whenever
# clients or faults change, a seed makes another world: these are a sample, and no proof.
KEPT = [
    (1, "memory"),  # A poller crashed when it could not give its leases back.
    (5, "embedded"),  # A poller crashed when it could not learn why its queue was gone.
    (9, "embedded"),  # Discovery crashed when leases could not be counted.
    (0, "aws"),  # A mark that was taken back was read by who was behind the time.
    (1001, "aws"),  # A list that two walkers took from each other was given up.
    (1005, "aws"),  # An index showed a row twice.
    (986, "embedded"),  # A run ended while its messages were sent again.
    (37, "embedded"),  # Pages of one row took for ever.
    (84, "aws"),  # A borrowed request named the receiver of another.
    (101, "embedded"),  # What an export holds was looked at as if it were an answer of ours.
    (213, "embedded"),  # The exports of a deleted run stayed.
    (409, "aws"),  # An answer broke off in the middle.
    (474, "embedded"),  # The key of a deleted run answered as before.
    (1014, "embedded"),  # A task was given up by who was killed over it.
    (10, "embedded"),  # Of those whose bodies the disk did not take, only one was told.
    (33, "aws"),  # A rerun fetched what was left of a bad line.
    (4, "mixed"),  # A list was in two stores at once.
    (12, "mixed"),
    (100800, "mixed"),  # A deletion was dated a day ahead, and the world ended before its repair.
    (750, "aws"),  # A message that nobody came for kept a queue from looking empty.
    (2, "postgres"),  # No seed draws this engine, so some are here: kills and lost commits,
    (3, "postgres"),  # and a crash of the server.
]


def wrongs(report: Report) -> list[str]:
    broken = [f"{violation.checker}: {violation.what}" for violation in report.violations]
    return broken + report.liveness_failures + report.crashes


@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_whatever_happens_every_invariant_holds_and_every_run_ends(seed: int) -> None:
    assert wrongs(simulate(draw(seed))) == []


@pytest.mark.parametrize(("seed", "engine"), KEPT)
def test_a_seed_that_found_something_finds_it_no_more(seed: int, engine: str) -> None:
    assert wrongs(simulate(draw(seed, engine=engine))) == []
