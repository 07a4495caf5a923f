"""One alarm clock for all the connections that wait for their peers.

A cancel scope for each request would cost as much as the rest of it. So a fetch writes down until
when it will wait, and a single task looks at the list when the first of these moments has come.
The task is started when there is something to wait for and ends when there no longer is.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

import trio

# Many moments close together are looked at in one go: a deadline may be missed by so much.
GRAIN_S = 0.01


class Interruptible(Protocol):
    def interrupt(self) -> None:
        """Makes the wait that goes on, if one does, raise TimedOut."""
        ...


class Watch:
    def __init__(self) -> None:
        self._until: dict[Interruptible, float] = {}
        self._next = inf
        self._alarm: trio.CancelScope | None = None

    def expect(self, waiting: Interruptible, until: float) -> None:
        """Interrupt `waiting` at `until`, unless it is forgotten or expected later by then."""
        self._until[waiting] = until
        if until < self._next:
            self._wake_at(until)

    def forget(self, waiting: Interruptible) -> None:
        self._until.pop(waiting, None)

    def _wake_at(self, moment: float) -> None:
        if self._alarm is not None:
            self._next = self._alarm.deadline = moment
        else:
            self._next = -inf  # The task is about to look at all of them.
            trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        try:
            while self._until:
                self._next = self._interrupt_due(trio.current_time())
                with trio.CancelScope(deadline=self._next) as self._alarm:
                    await trio.sleep_forever()
        finally:
            self._alarm, self._next = None, inf

    def _interrupt_due(self, now: float) -> float:
        """Returns when to look again."""
        following = inf
        for waiting, until in self._until.items():
            if until <= now:
                waiting.interrupt()
            following = min(following, until)
        return max(following, now + GRAIN_S)
