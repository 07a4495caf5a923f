"""The page about the kill matrix: what was died at, what came of it, and what was not reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.chaos.call_sites import call_sites
from tests.chaos.outcomes import BAD, DIED, NOT_PASSED, Outcome, Outcomes
from tests.chaos.site_program import SIDES
from tests.chaos.unreached import reason_for

KEPT = Path(__file__).parent / ".matrix.jsonl"
PAGE = Path(__file__).parent / "MATRIX.md"
EMBEDDED, AWS = "<!-- embedded -->", "<!-- aws -->"
_TITLE = "# The kill matrix\n"


def write(outcomes: Outcomes) -> list[str]:
    """Writes the part of the embedded engine; answers what is wrong, a line each."""
    complaints = complaints_over(outcomes)
    write_part(EMBEDDED, _page_of(outcomes, complaints))
    return complaints


def write_part(mark: str, text: str) -> None:
    """Each engine has its part of the page, and leaves the other alone."""
    page = PAGE.read_text() if PAGE.exists() else f"{_TITLE}\n{EMBEDDED}\n\n{AWS}\n"
    head, _, tail = page.partition(AWS)
    if mark == EMBEDDED:
        head = f"{_TITLE}\n{EMBEDDED}\n{text}\n"
    else:
        tail = f"\n{text}"
    PAGE.write_text(f"{head}{AWS}{tail}")


def complaints_over(outcomes: Outcomes) -> list[str]:
    """Bad outcomes, and points that nothing died at though nobody said why not."""
    results = outcomes.all()
    lines = [
        f"BAD: {_name_of(outcome)}: {outcome.why}" for outcome in results if outcome.what == BAD
    ]
    reached = {
        (outcome.point.site, outcome.point.side)
        for outcome in results
        if outcome.what != NOT_PASSED
    }
    lines += [
        f"NOT REACHED: {side} {site}"
        for site in sorted(call_sites() | {outcome.point.site for outcome in results})
        for side in SIDES
        if (site, side) not in reached and reason_for(site, side) is None
    ]
    return lines


def _name_of(outcome: Outcome) -> str:
    return f"{outcome.point.side} {outcome.point.site} in `{outcome.point.story}`"


def _page_of(outcomes: Outcomes, complaints: Sequence[str]) -> str:
    results = outcomes.all()
    sites = sorted(call_sites() | {outcome.point.site for outcome in results})
    died = {(outcome.point.site, outcome.point.side) for outcome in results if outcome.what == DIED}
    dead_sites = {site for site, _ in died}
    bad = [outcome for outcome in results if outcome.what == BAD]
    excused = [
        (site, side, reason)
        for site in sites
        for side in SIDES
        if (site, side) not in died and (reason := reason_for(site, side))
    ]
    return "\n".join(
        [
            "## Embedded",
            "",
            "Made by `python -m tests.chaos.matrix`: `conveyor dev` ends at a call site (a port's",
            "method and the function that calls it), is started again, the client asks again with",
            "its keys, the story must end as it should, and the auditor finds nothing.",
            "Each site is died at in the first story that passes it again, not in every story.",
            "The auditor leaves out what was deleted: it goes piece by piece.",
            "",
            f"- {len(sites)} call sites, before and after: {2 * len(sites)} points.",
            f"- {len(died)} points of {len(dead_sites)} sites were died at.",
            f"- {[outcome.what for outcome in results].count(DIED)} deaths ended well.",
            f"- **{len(bad)} bad outcomes.**",
            f"- {len(excused)} points are listed below with the reason why nothing dies there.",
            f"- {len(complaints)} complaints (bad, or neither reached nor listed).",
            "",
            *(f"- {complaint}" for complaint in complaints),
            "",
            "| engine | story | site | before | after | outcome |",
            "|---|---|---|---|---|---|",
            *_rows(results),
            "",
            "### Not died at",
            "",
            "| site | side | reason |",
            "|---|---|---|",
            *(f"| `{site}` | {side} | {reason} |" for site, side, reason in excused),
        ]
    )


def _rows(results: Sequence[Outcome]) -> list[str]:
    """A row for each story and site."""
    cells: dict[tuple[str, str], dict[str, Outcome]] = {}
    for one_outcome in results:
        cells.setdefault((one_outcome.point.site, one_outcome.point.story), {})[
            one_outcome.point.side
        ] = one_outcome
    rows = []
    for (site, story), sides in sorted(cells.items()):
        columns = [sides[side].what if side in sides else "-" for side in SIDES]
        outcome = next(
            (
                outcome_of_side.why
                for outcome_of_side in sides.values()
                if outcome_of_side.what == BAD
            ),
            "",
        )
        if not outcome:
            outcome = "ended well" if DIED in columns else "not passed again"
        rows.append(f"| embedded | {story} | `{site}` | {columns[0]} | {columns[1]} | {outcome} |")
    return rows
