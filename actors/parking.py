"""ParkingLot: messages in hand whose hosts are full, until there is room (SPEC.md 4.8).

A parked message has neither slot nor lease nor claim. If its receipt lapses, somebody else has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import trio

from conveyor.domain import limits
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Message, Queue


class ParkingLot:
    """Room for `LOT_MAX` messages, in a line for each host."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lines: dict[str, deque[Message]] = {}
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count >= limits.LOT_MAX

    @property
    def hosts(self) -> Iterable[str]:
        return self._lines.keys()

    def park(self, host: str, message: Message) -> None:
        """At the end of its host's line."""
        assert not self.is_full
        self._lines.setdefault(host, deque()).append(message)
        self._count += 1

    def take(self, host: str, count_max: int) -> list[Message]:
        """From the head of the host's line."""
        line = self._lines[host]
        taken = [line.popleft() for _ in range(min(count_max, len(line)))]
        self._count -= len(taken)
        if not line:
            del self._lines[host]
        return taken

    async def keep_forever(self) -> None:
        """Keeps the messages hidden; those that were lost all the same are forgotten."""
        while True:
            await trio.sleep(2 * limits.BEAT_S)
            parked = [message for line in self._lines.values() for message in line]
            if not parked:
                continue
            try:
                lost = await self._queue.extend(parked, visibility_s=limits.VISIBILITY_S)
            except Unavailable:
                continue  # There is time for one more try.
            self._forget(lost)

    def _forget(self, receipts: frozenset[str]) -> None:
        kept = [
            (host, message)
            for host, line in self._lines.items()
            for message in line
            if message.receipt not in receipts
        ]
        self._lines, self._count = {}, 0
        for host, message in kept:
            self.park(host, message)

    async def empty(self) -> None:
        """Puts everything back, for anybody to have."""
        parked = [message for host in list(self.hosts) for message in self.take(host, self._count)]
        if parked:
            await self._queue.bounce(parked, delay_s=0.0)
