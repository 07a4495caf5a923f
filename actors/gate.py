"""FairGate: how many tasks this process runs at once, shared by caller, then by run (SPEC 6.7).

A slot goes to the caller with the fewest tasks in flight, and within it to the run that has the
fewest for its weight; ties go to whoever has waited longest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from conveyor.domain.ids import CallerId, RunId

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class _Waiter:
    caller: CallerId
    run_id: RunId
    weight: int
    count_max: int
    granted: int = 0
    ready: trio.Event = field(default_factory=trio.Event)


class FairGate:
    """Slots for `capacity` tasks."""

    def __init__(self, *, capacity: int) -> None:
        assert capacity >= 1
        self.capacity = capacity
        self._free = capacity
        self._aside_count = 0
        self._waiters: list[_Waiter] = []
        self._by_caller: Counter[CallerId] = Counter()
        self._by_run: Counter[RunId] = Counter()
        self._is_shut = False
        self._emptied = trio.Event()

    @property
    def inflight_count(self) -> int:
        return self.capacity - self._free

    @property
    def free_count(self) -> int:
        return self._free

    @property
    def is_full(self) -> bool:
        return self._free == 0

    @property
    def is_settling_urgent(self) -> bool:
        """Whether those that only have their outcome to write should get on with it: nothing is
        fetched beside them, or soon there is no room for more of them."""
        return self._free == self.capacity or 4 * self._aside_count >= 3 * self.capacity

    async def take(self, caller: CallerId, run_id: RunId, *, weight: int, count_max: int) -> int:
        """Waits for at least one slot and takes up to `count_max`; answers how many: none once the
        gate is shut."""
        assert count_max >= 1
        if self._is_shut:
            return 0
        waiter = _Waiter(caller, run_id, weight, count_max)
        self._waiters.append(waiter)
        self._grant()
        try:
            await waiter.ready.wait()
        except BaseException:
            self._waiters.remove(waiter)
            self.give_back(caller, run_id, waiter.granted)
            raise
        self._waiters.remove(waiter)
        return waiter.granted

    async def drain(self) -> None:
        """Lets nobody in any more, and waits until the last one has left."""
        self._is_shut = True
        for waiter in self._waiters:
            waiter.ready.set()
        self._note_emptied()
        await self._emptied.wait()

    def give_back(self, caller: CallerId, run_id: RunId, count: int) -> None:
        """Returns slots; whoever waits most fairly gets them."""
        if count == 0:
            return
        self._free += count
        self._count(caller, run_id, -count)
        assert self._free <= self.capacity
        self._grant()
        self._note_emptied()

    def step_aside(self, caller: CallerId, run_id: RunId) -> bool:
        """Frees the slot of a task that only has its outcome to write, unless as many as there are
        slots have done so: what they keep in memory stays bounded."""
        if self._aside_count == self.capacity:
            return False
        self._aside_count += 1
        self.give_back(caller, run_id, 1)
        return True

    def leave(self) -> None:
        """One that stepped aside is done."""
        assert self._aside_count
        self._aside_count -= 1
        self._note_emptied()

    def _note_emptied(self) -> None:
        if self._is_shut and self._free == self.capacity and not self._aside_count:
            self._emptied.set()

    def _grant(self) -> None:
        """A waiter stays in line until it wakes: slots that are freed meanwhile add to its own."""
        if self._is_shut:
            return
        hungry = [waiter for waiter in self._waiters if waiter.granted < waiter.count_max]
        while self._free and hungry:
            waiter = hungry[0] if len(hungry) == 1 else min(hungry, key=self._share)
            count = min(self._free, waiter.count_max - waiter.granted) if len(hungry) == 1 else 1
            waiter.granted += count
            waiter.ready.set()
            self._free -= count
            self._count(waiter.caller, waiter.run_id, count)
            if waiter.granted == waiter.count_max:
                hungry.remove(waiter)

    def _share(self, waiter: _Waiter) -> tuple[int, float]:
        return self._by_caller[waiter.caller], self._by_run[waiter.run_id] / waiter.weight

    def _count(self, caller: CallerId, run_id: RunId, count: int) -> None:
        _add(self._by_caller, caller, count)
        _add(self._by_run, run_id, count)


def _add(counter: Counter[K], key: K, count: int) -> None:
    counter[key] += count
    if not counter[key]:
        del counter[key]
