"""Tests that faults occur at their rates, and that a suite reports those that never did."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

import conveyor.simulation
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.options import draw
from conveyor.simulation.simulator import Report
from conveyor.simulation.suite import HASH_EVERY, JUDGED_FROM, RARE_JUDGED_FROM, Summary


@pytest.mark.parametrize("fault", Fault)
def test_every_named_fault_is_used_in_the_simulator(fault: Fault) -> None:
    package = Path(conveyor.simulation.__file__).parent
    elsewhere = [path for path in package.rglob("*.py") if path.name != "faults.py"]

    assert any(f"Fault.{fault.name}" in path.read_text() for path in elsewhere)


def test_every_rate_is_above_zero_in_some_seed() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen.update(name for name, rate in draw(seed).rates.items() if rate)

    assert set(draw(0).rates) == set(seen)


def test_a_fault_occurs_at_its_rate_until_faults_are_switched_off() -> None:
    faults = Faults({Fault.CALL_SLOW: 0.5}, Random(1))
    struck = sum(faults.occurs(Fault.CALL_SLOW) for _ in range(1000))
    faults.stop_faults()

    assert 400 < struck < 600
    assert faults.counts[Fault.CALL_SLOW] == struck
    assert not any(faults.occurs(Fault.CALL_SLOW) for _ in range(100))
    assert not faults.occurs(Fault.PAUSED)


def test_a_suite_of_enough_seeds_names_the_faults_that_never_occurred() -> None:
    summary = Summary()
    all_but_one = {fault.value: 1 for fault in Fault if fault is not Fault.PAUSED}
    for seed in range(JUDGED_FROM):
        assert summary.never_occurred() == []
        summary.add(Report(options=draw(seed, engine="memory"), hash="", faults=all_but_one))

    assert summary.never_occurred() == [Fault.PAUSED.value]


def test_faults_of_engines_that_did_not_run_are_not_reported() -> None:
    summary = Summary()
    for seed in range(JUDGED_FROM):
        summary.add(Report(options=draw(seed, engine="memory"), hash=""))

    assert Fault.LEASES_LOST.value in summary.never_occurred()
    assert Fault.COMMIT_FAILED.value not in summary.never_occurred()


def test_a_long_suite_reports_the_hash_of_a_shorter_one() -> None:
    longer, shorter = Summary(), Summary()
    for number in range(HASH_EVERY + 5):
        report = Report(options=draw(0, engine="memory"), hash=str(number))
        longer.add(report)
        if number < HASH_EVERY:
            shorter.add(report)

    assert longer.marks == {HASH_EVERY: shorter.hash}
    assert longer.hash != shorter.hash


def test_a_rare_fault_is_reported_only_after_more_seeds() -> None:
    few, many = Summary(seeds=JUDGED_FROM), Summary(seeds=RARE_JUDGED_FROM)
    for summary in (few, many):
        summary.engines["memory"] += 1

    assert Fault.GATEWAY_UNREACHABLE.value not in few.never_occurred()
    assert Fault.GATEWAY_LIMITED.value in few.never_occurred()
    assert Fault.GATEWAY_UNREACHABLE.value in many.never_occurred()
