"""Tallies: a group of settles counted together, one write per counter row instead of one per task.

A settle flips a task and counts it. The flips of a group stand alone, one guarded statement each;
what they add to a counter row is summed up and added at the end, if its gate lets it. That halves
the cost of a settle (27 us of CPU in groups of 90, against 54).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence

from conveyor.domain.changes import (
    AnyKey,
    Applied,
    Change,
    Guard,
    Missing,
    Row,
    Stale,
    Update,
    Verdict,
)
from conveyor.engines.embedded import statements

Refuse = Callable[[sqlite3.Connection, Change], Stale | Missing]
_Count = tuple[AnyKey, Guard]


def apply_tallies(
    connection: sqlite3.Connection, changes: Sequence[Change], refuse: Refuse
) -> list[Verdict]:
    """Performs changes that are all tallies; `refuse` says what is wrong with one that is not."""
    gates: dict[_Count, bool | None] = {}
    sums: dict[_Count, Counter[str]] = {}
    judged: list[Stale | Missing | Row | None] = []
    for change in changes:
        flip, count = change.writes
        assert isinstance(flip, Update)
        assert isinstance(count, Update)
        gate = (count.key, count.guard)
        if gate not in gates:
            gates[gate] = statements.holds(connection, *gate)
        done = bool(gates[gate]) and statements.update(connection, flip)
        if done is False:
            # Right away: what stands there now may be changed by the next one.
            judged.append(refuse(connection, change))
            continue
        sums.setdefault(gate, Counter()).update(count.deltas)
        judged.append(None if done is True else done)
    counters = {
        key: statements.update(connection, Update(key, guard, {}, dict(total)))
        for (key, guard), total in sums.items()
    }
    return [
        each if isinstance(each, Stale | Missing) else _applied(change, each, counters)
        for change, each in zip(changes, judged, strict=True)
    ]


def _applied(change: Change, flipped: Row | None, counters: dict[AnyKey, Row | bool]) -> Applied:
    _, count = change.writes
    counter = counters[count.key]
    assert not isinstance(counter, bool), "a gate that was open a moment ago"
    return Applied((flipped, counter))
