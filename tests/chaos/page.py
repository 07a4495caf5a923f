"""Writes MATRIX.md: the points of the kill matrix, their outcomes, and the unreached ones."""

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
    """Writes the part of the embedded engine. Returns its problems, one line each."""
    problems = find_problems(outcomes)
    write_part(EMBEDDED, _page_of(outcomes, problems))
    return problems


def write_part(mark: str, text: str) -> None:
    """Replaces the part of one engine; the part of the other engine stays."""
    page = PAGE.read_text() if PAGE.exists() else f"{_TITLE}\n{EMBEDDED}\n\n{AWS}\n"
    head, _, tail = page.partition(AWS)
    if mark == EMBEDDED:
        head = f"{_TITLE}\n{EMBEDDED}\n{text}\n"
    else:
        tail = f"\n{text}"
    PAGE.write_text(f"{head}{AWS}{tail}")


def find_problems(outcomes: Outcomes) -> list[str]:
    """Returns bad outcomes, and points without a death and without a listed reason."""
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


def _page_of(outcomes: Outcomes, problems: Sequence[str]) -> str:
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
            "Written by `python -m tests.chaos.matrix`: `conveyor dev` ends at a call site (a",
            "port's method and the function that calls it) and is started again. The client",
            "repeats its request with the same key. The story must end as it should, and the",
            "auditor must find nothing. The process dies at each site in the first story that",
            "passes it again, not in every story. The auditor ignores deleted runs, whose rows",
            "are removed in steps.",
            "",
            f"- {len(sites)} call sites, before and after: {2 * len(sites)} points.",
            f"- {len(died)} points of {len(dead_sites)} sites had a death.",
            f"- {[outcome.what for outcome in results].count(DIED)} stories ended well.",
            f"- **{len(bad)} bad outcomes.**",
            f"- {len(excused)} points without a death are listed below with the reason.",
            f"- {len(problems)} problems (bad, or neither reached nor listed).",
            "",
            *(f"- {problem}" for problem in problems),
            "",
            "| engine | story | site | before | after | outcome |",
            "|---|---|---|---|---|---|",
            *_rows(results),
            "",
            "### Points without a death",
            "",
            "| site | side | reason |",
            "|---|---|---|",
            *(f"| `{site}` | {side} | {reason} |" for site, side, reason in excused),
        ]
    )


def _rows(results: Sequence[Outcome]) -> list[str]:
    """Returns a row for each story and site."""
    cells: dict[tuple[str, str], dict[str, Outcome]] = {}
    for result in results:
        cells.setdefault((result.point.site, result.point.story), {})[result.point.side] = result
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
