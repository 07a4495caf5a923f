"""Story: of a long trace, what a reader needs to see why a seed failed (docs/simulator.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from conveyor.simulation.trace.trace import Line

NAMED_MAX = 150
"""So many lines, at most, about those whom a failure names, the last ones."""
DISTURBED_MAX = 50
"""And so many of what happened meanwhile to processes, clocks and engines; and to calls."""
LEAD_S = 120.0
"""What happened so long before the first of these lines may have to do with it."""

_ID = re.compile(r"\b(?:[0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{32})\b")
_WORLD = "chaos"
_DISTURBANCES = frozenset(
    {
        "asked to stop",
        "clock stepped",
        "crashed",
        "ended",
        "gave up",
        "is of another release",
        "killed",
        "paused",
        "resumed",
        "started",
    }
)


def story_of(lines: Sequence[Line], wrongs: Iterable[str]) -> list[Line]:
    """Returns the lines about the rows named in `wrongs`, and the faults of that time, in order."""
    ids = {row_id for wrong in wrongs for row_id in _ID.findall(wrong)}
    named = _last(NAMED_MAX, lines, lambda line: _is_about(line, ids))
    if not named:
        return []
    since = lines[named[0]].at - LEAD_S
    disturbed = _last(DISTURBED_MAX, lines, lambda line: line.at >= since and is_disturbance(line))
    failed = _last(DISTURBED_MAX, lines, lambda line: line.at >= since and line.is_fault)
    return [lines[index] for index in sorted({*named, *disturbed, *failed})]


def is_disturbance(line: Line) -> bool:
    """Whether the line tells what befell a process, a clock or a whole engine."""
    return line.who == _WORLD or line.what in _DISTURBANCES


def _is_about(line: Line, ids: set[str]) -> bool:
    return not line.is_minor and (not ids or any(row_id in line.detail for row_id in ids))


def _last(count: int, lines: Sequence[Line], fits: Callable[[Line], bool]) -> list[int]:
    """Where the last of those stand that fit."""
    return [index for index, line in enumerate(lines) if fits(line)][-count:]
