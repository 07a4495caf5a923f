"""Selects the lines of a trace that explain why a seed failed (docs/simulator.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from conveyor.simulation.trace.trace import Line

NAMED_MAX = 150
"""The summary shows at most this many lines about the ids that the failures name: the last ones."""
DISTURBED_MAX = 50
"""The summary shows at most this many lines about faults of processes, clocks and engines, and as
many about failed calls."""
LEAD_S = 120.0
"""Faults within this time before the first shown line may have caused the failure."""

_ID = re.compile(r"\b(?:[0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{32})\b")
# The name under which the fault scheduler writes to the trace.
_SCHEDULER = "chaos"
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


def summarize_failure(lines: Sequence[Line], failures: Iterable[str]) -> list[Line]:
    """Returns the lines about the ids named in `failures`, and the faults of that time, in
    order."""
    ids = {row_id for failure in failures for row_id in _ID.findall(failure)}
    named = _last(NAMED_MAX, lines, lambda line: _is_about(line, ids))
    if not named:
        return []
    since = lines[named[0]].at - LEAD_S
    disturbed = _last(DISTURBED_MAX, lines, lambda line: line.at >= since and is_disturbance(line))
    failed = _last(DISTURBED_MAX, lines, lambda line: line.at >= since and line.is_fault)
    return [lines[index] for index in sorted({*named, *disturbed, *failed})]


def is_disturbance(line: Line) -> bool:
    """Whether the line reports a fault of a process, a clock or a whole engine."""
    return line.who == _SCHEDULER or line.what in _DISTURBANCES


def _is_about(line: Line, ids: set[str]) -> bool:
    return not line.is_minor and (not ids or any(row_id in line.detail for row_id in ids))


def _last(count: int, lines: Sequence[Line], fits: Callable[[Line], bool]) -> list[int]:
    """The indexes of the last `count` lines for which `fits` returns True."""
    return [index for index, line in enumerate(lines) if fits(line)][-count:]
