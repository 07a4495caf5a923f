"""What the kill matrix counts as complete."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.call_sites import call_sites
from tests.chaos.outcomes import BAD, DIED, Outcome, Outcomes, Point
from tests.chaos.page import complaints_over
from tests.chaos.site_program import SIDES
from tests.chaos.unreached import UNREACHED

SITE = "store.commit@usecases.run.runs.stop"


def test_a_site_that_is_excused_is_one_that_there_is() -> None:
    excused = {name.split(":")[-1] for name in UNREACHED}

    assert excused - call_sites() == set()


def test_a_point_that_nobody_died_at_is_a_complaint(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "kept.jsonl")
    outcomes.note(Outcome("embedded", Point("stopped", SITE, "before"), DIED))

    of_site = [complaint for complaint in complaints_over(outcomes) if complaint.endswith(SITE)]

    assert of_site == [f"NOT REACHED: after {SITE}"]


def test_a_bad_outcome_is_a_complaint_after_the_next_start_too(tmp_path: Path) -> None:
    for side in SIDES:
        outcome = Outcome("embedded", Point("stopped", SITE, side), BAD, "lost")
        Outcomes(tmp_path / "kept.jsonl").note(outcome)

    complaints = complaints_over(Outcomes(tmp_path / "kept.jsonl"))

    assert [complaint for complaint in complaints if complaint.startswith("BAD")] == [
        f"BAD: {side} {SITE} in `stopped`: lost" for side in SIDES
    ]
