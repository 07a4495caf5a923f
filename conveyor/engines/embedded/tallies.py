"""Tallies: a group of settles counted together, one write per counter row instead of one per task.

A settle flips a task and counts it. The flips of a group stand alone, one guarded statement each;
what they add to a counter row is summed up and added at the end, if its gate lets it. That halves
the cost of a settle (27 us of CPU in groups of 90, against 54).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence

from conveyor.domain.changes import AnyKey, Applied, Change, Guard, Row, Update, Verdict
from conveyor.engines.embedded import statements

Refuse = Callable[[sqlite3.Connection, Change], Verdict]
_Count = tuple[AnyKey, Guard]


def apply_tallies(
    connection: sqlite3.Connection, changes: Sequence[Change], refuse: Refuse
) -> list[Verdict]:
    """Performs changes that are all tallies; `refuse` says what is wrong with one that is not."""
    gates: dict[_Count, bool | None] = {}
    sums: dict[_Count, Counter[str]] = {}
    flips: list[Row | bool] = []
    for change in changes:
        flip, count = change.writes
        assert isinstance(flip, Update)
        assert isinstance(count, Update)
        gate = (count.key, count.guard)
        if gate not in gates:
            gates[gate] = statements.holds(connection, *gate)
        done = bool(gates[gate]) and statements.update(connection, flip)
        if done:
            sums.setdefault(gate, Counter()).update(count.deltas)
        flips.append(done)
    counters = {
        key: statements.update(connection, Update(key, guard, {}, dict(total)))
        for (key, guard), total in sums.items()
    }
    return [
        refuse(connection, change) if done is False else _applied(change, done, counters)
        for change, done in zip(changes, flips, strict=True)
    ]


def _applied(change: Change, done: Row | bool, counters: dict[AnyKey, Row | bool]) -> Applied:
    _, count = change.writes
    counter = counters[count.key]
    assert not isinstance(counter, bool), "a gate that was open a moment ago"
    return Applied((None if isinstance(done, bool) else done, counter))
