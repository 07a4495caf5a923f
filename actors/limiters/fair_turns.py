"""FairTurns: which background work starts next, where only a little fits at once.

A caller with many large exports or crawls must not delay those of another caller.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeVar

import trio

from conveyor.domain.ids import CallerId

T = TypeVar("T")


class FairTurns:
    """Keeps when each caller was served. At most `at_once_max` pieces of work are in progress, and
    `caller_max` of one caller. The caller that was served longest ago comes first."""

    def __init__(self, *, at_once_max: int, caller_max: int) -> None:
        self._at_once_max = at_once_max
        self._caller_max = caller_max
        self._served_at: dict[CallerId, float] = {}

    def choose(
        self, due: Iterable[tuple[T, CallerId]], under_way: Iterable[CallerId]
    ) -> list[tuple[T, CallerId]]:
        """Chooses the work that starts now. `under_way` has the callers of the work in progress."""
        waiting: defaultdict[CallerId, list[T]] = defaultdict(list)
        for work, caller in due:
            waiting[caller].append(work)
        busy = Counter(under_way)
        self._forget_others({*waiting, *busy})
        callers = sorted(waiting, key=lambda caller: self._served_at.get(caller, -math.inf))
        # One piece of work of each caller per round: no caller's second piece comes before another
        # caller's first.
        in_order = [
            (work, caller)
            for turn in range(self._caller_max)
            for caller in callers
            for work in waiting[caller][turn : turn + 1]
            if busy[caller] + turn < self._caller_max
        ]
        chosen = in_order[: max(self._at_once_max - busy.total(), 0)]
        self._served_at |= {caller: trio.current_time() for _, caller in chosen}
        return chosen

    def _forget_others(self, callers: set[CallerId]) -> None:
        """Forgets callers without work, because the dict would grow without bound."""
        for caller in self._served_at.keys() - callers:
            del self._served_at[caller]
