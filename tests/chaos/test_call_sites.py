"""Tests the completeness check of the kill matrix."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.call_sites import call_sites
from tests.chaos.outcomes import BAD, DIED, Outcome, Outcomes, Point
from tests.chaos.page import find_problems
from tests.chaos.site_program import SIDES
from tests.chaos.unreached import UNREACHED

SITE = "store.commit@usecases.run.runs.stop"


def test_every_site_listed_as_unreached_exists_in_the_sources() -> None:
    excused = {name.split(":")[-1] for name in UNREACHED}

    assert excused - call_sites() == set()


def test_a_point_without_a_death_is_a_problem(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "kept.jsonl")
    outcomes.note(Outcome("embedded", Point("stopped", SITE, "before"), DIED))

    of_site = [problem for problem in find_problems(outcomes) if problem.endswith(SITE)]

    assert of_site == [f"NOT REACHED: after {SITE}"]


def test_a_bad_outcome_is_still_a_problem_after_a_restart(tmp_path: Path) -> None:
    for side in SIDES:
        outcome = Outcome("embedded", Point("stopped", SITE, side), BAD, "lost")
        Outcomes(tmp_path / "kept.jsonl").note(outcome)

    problems = find_problems(Outcomes(tmp_path / "kept.jsonl"))

    assert [problem for problem in problems if problem.startswith("BAD")] == [
        f"BAD: {side} {SITE} in `stopped`: lost" for side in SIDES
    ]
