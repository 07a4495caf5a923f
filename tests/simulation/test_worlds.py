"""Simulates a sample of seeds, and seeds that once found a defect."""

from __future__ import annotations

import os

import pytest

from conveyor.simulation.options import draw
from conveyor.simulation.simulator import Report, simulate

pytestmark = pytest.mark.slow

SEEDS_COUNT = int(os.environ.get("CONVEYOR_TEST_SEEDS", "12"))

# Each defect has a test of its own; here these seeds only have to pass. A change of clients or
# faults changes what a seed does, so this is a sample and no proof.
REGRESSION_SEEDS = [
    (1, "memory"),  # A poller crashed when it could not give its leases back.
    (5, "embedded"),  # A poller crashed when it could not learn why its queue was gone.
    (9, "embedded"),  # Queue discovery crashed when leases could not be counted.
    (0, "aws"),  # A worker with a late clock read a mark that had been removed.
    (1001, "aws"),  # Two ingesters took a list from each other until it was given up.
    (1005, "aws"),  # An index showed a row twice.
    (986, "embedded"),  # A run ended while its messages were being resent.
    (37, "embedded"),  # Paging with one row a page never ended.
    (84, "aws"),  # A request copied from another tenant named that tenant's receiver.
    (101, "embedded"),  # A checker read the content of an export as if it were an API response.
    (213, "embedded"),  # The exports of a deleted run were not removed.
    (409, "aws"),  # A response was interrupted in the middle.
    (474, "embedded"),  # The idempotency key of a deleted run still replayed its response.
    (1014, "embedded"),  # A worker that was killed over a task still failed it.
    (10, "embedded"),  # Of several bodies that the disk refused, only one caller got the error.
    (33, "aws"),  # A rerun fetched the rest of an invalid line.
    (4, "mixed"),  # A list was in two stores at the same time.
    (12, "mixed"),
    (100800, "mixed"),  # A deletion was dated a day ahead, and the world ended before its repair.
    (750, "aws"),  # A message that no worker received made a queue look non-empty.
    (2, "postgres"),  # No seed draws this engine, so some are here: kills and lost commits,
    (3, "postgres"),  # and a crash of the server.
]


def problems_of(report: Report) -> list[str]:
    broken = [f"{violation.checker}: {violation.sentence}" for violation in report.violations]
    return broken + report.liveness_failures + report.crashes


@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_in_every_world_all_invariants_hold_and_every_run_ends(seed: int) -> None:
    assert problems_of(simulate(draw(seed))) == []


@pytest.mark.parametrize(("seed", "engine"), REGRESSION_SEEDS)
def test_a_seed_that_found_a_defect_passes(seed: int, engine: str) -> None:
    assert problems_of(simulate(draw(seed, engine=engine))) == []
