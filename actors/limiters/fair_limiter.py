"""FairLimiter: the slots in which this process fetches, shared by caller, then by run (SPEC.md
4.7).

A caller that fetches slow pages must not keep the slots from the others, however many keys it has.
Three rules see to that:

- A slot goes to the caller with the fewest, where each `TURN_S` seconds for which it used a slot
  lately count like a slot that it holds, up to `HEAD_START`; within a caller to the run that has
  the fewest for its weight; ties go to the longest wait.
- A caller may hold at most `SHARE` times as many slots as remain free (the dynamic threshold of
  shared-memory switches). One caller alone reaches `capacity`, and half as many slots again are
  left. With B callers all come to hold `SHARE / (1 + SHARE * B)` of all slots, their fair part,
  and part of the slots stays free for the next caller. No fetch has to be interrupted for it, so
  the rule also serves callers of a gateway that charges.
- It takes effect as slots are freed, and slow pages free none. So a caller that has waited for
  `WAIT_TIMEOUT_S` and holds less than its fair part, or than its head start, preempts fetches of
  callers that hold more than their part, the latest first: the fetches that began earlier go on,
  and each caller makes progress. Where no caller holds more than its part, the fetch that has
  overstayed its turn the most gives its slot up. A turn lasts `TURN_S`; beside callers that use as
  much, twice as long each time the message comes back: a page that is merely slow is fetched in
  the end. A preempted task is handed back without an attempt. Fetches that are paid for are never
  preempted: there a caller may have to wait until a call ends, behind several callers that hold
  keys of the gateway and ask for slow pages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from conveyor.domain.ids import CallerId, RunId

K = TypeVar("K")

# With 2, one caller leaves a third of all slots to others.
SHARE = 2
# Pages that answer free a slot sooner than that; small enough to keep a short job short.
PATIENCE_S = 1.5
TURN_S = 3.0
# Any number of callers may wait; whether to preempt is decided at most this often.
JUDGE_S = 0.25
TURN_DOUBLINGS_MAX = 5
# A caller with a short job is through before its head start is used up.
HEAD_START = 5
# What a caller used is forgotten by and by, about as soon as a silent page would time out.
USAGE_S = 60.0


def slots_count(capacity: int) -> int:
    """All slots of a gate in which one caller alone may have `capacity`."""
    return capacity + -(-capacity // SHARE)


@dataclass(slots=True, eq=False)
class _Waiter:
    caller: CallerId
    run_id: RunId
    weight: int
    count_max: int
    since: float
    granted: int = 0
    ready: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, eq=False)
class Preemptible:
    """A fetch that may be interrupted, and for how long it may have its slot beside waiters."""

    caller: CallerId
    cancel: Callable[[], None]
    began_at: float
    turn_s: float


class SlotUsage:
    """For how many seconds each caller has used slots lately."""

    def __init__(self) -> None:
        self._used: dict[CallerId, tuple[float, float]] = {}
        self._pruned_at = 0.0

    def read(self, caller: CallerId, held: int) -> float:
        used_s, at = self._used.get(caller, (0.0, 0.0))
        elapsed_s = trio.current_time() - at
        # The integral of what is held now, with what lies back fading.
        fading = math.exp(-elapsed_s / USAGE_S)
        return used_s * fading + held * USAGE_S * (1.0 - fading)

    def note(self, caller: CallerId, held: int) -> None:
        """Before the number of slots that a caller holds changes from `held`."""
        now = trio.current_time()
        self._used[caller] = (self.read(caller, held), now)
        if now - self._pruned_at > USAGE_S:
            self._pruned_at = now
            old = now - 5 * USAGE_S
            self._used = {each: use for each, use in self._used.items() if use[1] > old}


class FairLimiter:
    """Slots for `capacity` tasks of one caller, and a reserve for others."""

    def __init__(self, *, capacity: int) -> None:
        assert capacity >= 1
        self.capacity = capacity
        self.slots_count = slots_count(capacity)
        self._free = self.slots_count
        self._writing_count = 0
        self._waiters: list[_Waiter] = []
        self._by_caller: Counter[CallerId] = Counter()
        self._by_run: Counter[RunId] = Counter()
        self._usage = SlotUsage()
        # Since when a caller has had fewer slots than it asked for.
        self._unsatisfied_since: dict[CallerId, float] = {}
        self._judged_at = -math.inf
        # Fetches that may be preempted, by caller, in the order in which they began.
        self._preemptible: dict[CallerId, dict[Preemptible, None]] = {}
        self._preempted: set[Preemptible] = set()
        self._is_shut = False
        self._emptied = trio.Event()

    @property
    def inflight_count(self) -> int:
        return self.slots_count - self._free

    def room_for(self, caller: CallerId) -> int:
        """How many slots the caller could take now, if it alone asked."""
        held = self._by_caller[caller]
        room = (SHARE * self._free - held) // (1 + SHARE)
        # The first slot of a caller needs no reserve behind it: it is what the reserve is for.
        return max(room, 0 if held or not self._free else 1)

    @property
    def is_settling_urgent(self) -> bool:
        """Whether those that only have their outcome to write should get on with it: nothing is
        fetched beside them, or soon there is no room for more of them."""
        return self._free == self.slots_count or 4 * self._writing_count >= 3 * self.capacity

    async def acquire(self, caller: CallerId, run_id: RunId, *, weight: int, count_max: int) -> int:
        """Waits for at least one slot and takes up to `count_max`; answers how many: none once the
        gate is shut."""
        assert count_max >= 1
        if self._is_shut:
            return 0
        since = self._unsatisfied_since.setdefault(caller, trio.current_time())
        waiter = _Waiter(caller, run_id, weight, count_max, since)
        self._waiters.append(waiter)
        self._grant()
        try:
            await self._wait_ready(waiter)
        except BaseException:
            self._waiters.remove(waiter)
            self.release(caller, run_id, waiter.granted)
            raise
        self._waiters.remove(waiter)
        if waiter.granted == count_max:  # Otherwise its next wait goes on from here.
            self._unsatisfied_since.pop(caller, None)
        return waiter.granted

    async def _wait_ready(self, waiter: _Waiter) -> None:
        while True:
            with trio.move_on_after(PATIENCE_S):
                await waiter.ready.wait()
                return
            self._preempt_for_patient()

    async def drain(self) -> None:
        """Lets nobody in any more, and waits until the last one has left."""
        self._is_shut = True
        for waiter in self._waiters:
            waiter.ready.set()
        self._note_emptied()
        await self._emptied.wait()

    def release(self, caller: CallerId, run_id: RunId, count: int) -> None:
        """Returns slots; whoever waits most fairly gets them."""
        if count == 0:
            return
        self._free += count
        self._count(caller, run_id, -count)
        assert self._free <= self.slots_count
        self._grant()
        self._note_emptied()

    def begin_write(self, caller: CallerId, run_id: RunId) -> bool:
        """Frees the slot of a task that only has its outcome to write, unless `capacity` tasks
        have done so: what they keep in memory stays bounded."""
        if self._writing_count == self.capacity:
            return False
        self._writing_count += 1
        self.release(caller, run_id, 1)
        return True

    def end_write(self) -> None:
        """One that stepped aside is done."""
        assert self._writing_count
        self._writing_count -= 1
        self._note_emptied()

    def allow_preemption(
        self, caller: CallerId, cancel: Callable[[], None], *, receives: int
    ) -> Preemptible:
        """From now on the fetch in this slot may be interrupted by `cancel`."""
        doublings = min(max(receives, 1) - 1, TURN_DOUBLINGS_MAX)
        fetch = Preemptible(caller, cancel, trio.current_time(), TURN_S * 2.0**doublings)
        self._preemptible.setdefault(caller, {})[fetch] = None
        return fetch

    def forbid_preemption(self, fetch: Preemptible) -> None:
        """The fetch is over, or has been interrupted and has left; safe to repeat."""
        self._preempted.discard(fetch)
        self._forget(fetch)

    def _forget(self, fetch: Preemptible) -> None:
        fetches = self._preemptible.get(fetch.caller, {})
        fetches.pop(fetch, None)
        if not fetches:
            self._preemptible.pop(fetch.caller, None)

    def _preempt_for_patient(self) -> None:
        """Interrupts as many fetches as all callers need that have waited for long enough."""
        now = trio.current_time()
        if self._is_shut or now - self._judged_at < JUDGE_S:
            return
        self._judged_at = now
        callers = {each.caller for each in self._waiters} | self._by_caller.keys()
        since = self._unsatisfied_since
        self._unsatisfied_since = {each: since[each] for each in since if each in callers}
        fair = max(1, SHARE * self.slots_count // (1 + SHARE * len(callers)))
        needed = self._needed(fair) - self._free - len(self._preempted)
        for _ in range(needed):
            fetch = self._latest_of_largest(fair) or self._longest_overstayed()
            if fetch is None:
                return
            self._forget(fetch)
            self._preempted.add(fetch)
            # Its caller waits behind the others now, or it would have the slot again.
            self._waiters.sort(key=lambda waiter: waiter.caller == fetch.caller)
            fetch.cancel()

    def _needed(self, fair: int) -> int:
        """How many slots must be free for the patient callers to reach their fair part: what they
        take, and what has to remain beside it."""
        patient_since = trio.current_time() - PATIENCE_S
        wanted: Counter[CallerId] = Counter()
        for waiter in self._waiters:
            if not waiter.granted and waiter.since <= patient_since:
                wanted[waiter.caller] += waiter.count_max
        taken = remaining = 0
        for caller, count in wanted.items():
            held = self._by_caller[caller]
            part = max(fair, HEAD_START - self._turns_used(caller))
            more = min(count, part - held)
            if more > 0:
                taken += more
                remaining = max(remaining, -(-(held + more) // SHARE) if held + more > 1 else 0)
        return taken + remaining

    def _latest_of_largest(self, fair: int) -> Preemptible | None:
        leaving = Counter(fetch.caller for fetch in self._preempted)
        largest = max(
            self._preemptible,
            key=lambda caller: self._by_caller[caller] - leaving[caller],
            default=None,
        )
        if largest is None or self._by_caller[largest] - leaving[largest] <= fair:
            return None
        return next(reversed(self._preemptible[largest]))

    def _longest_overstayed(self) -> Preemptible | None:
        least_s = min(self._used_s(waiter.caller) for waiter in self._waiters)
        firsts = [next(iter(fetches)) for fetches in self._preemptible.values()]
        longest = max(firsts, key=lambda fetch: self._overstay_s(fetch, least_s), default=None)
        if longest is None or self._overstay_s(longest, least_s) < 0:
            return None
        return longest

    def _overstay_s(self, fetch: Preemptible, least_s: float) -> float:
        """How much longer than its turn a fetch has run, as the caller that waits and has used
        the least sees it."""
        is_modest = 2 * least_s < self._used_s(fetch.caller)
        turn_s = TURN_S if is_modest else fetch.turn_s
        return trio.current_time() - fetch.began_at - turn_s

    def _turns_used(self, caller: CallerId) -> int:
        return min(int(self._used_s(caller) / TURN_S), HEAD_START)

    def _used_s(self, caller: CallerId) -> float:
        return self._usage.read(caller, self._by_caller[caller])

    def _note_emptied(self) -> None:
        if self._is_shut and self._free == self.slots_count and not self._writing_count:
            self._emptied.set()

    def _grant(self) -> None:
        """A waiter stays in line until it wakes: slots that are freed meanwhile add to its own."""
        if self._is_shut:
            return
        hungry = self._hungry() if self._free else []
        while hungry:
            waiter = hungry[0] if len(hungry) == 1 else min(hungry, key=self._share)
            room = self.room_for(waiter.caller)
            count = min(room, waiter.count_max - waiter.granted) if len(hungry) == 1 else 1
            waiter.granted += count
            waiter.ready.set()
            self._free -= count
            self._count(waiter.caller, waiter.run_id, count)
            hungry = self._hungry()

    def _hungry(self) -> list[_Waiter]:
        """The waiters that want more and may have more."""
        return [
            waiter
            for waiter in self._waiters
            if waiter.granted < waiter.count_max and self.room_for(waiter.caller)
        ]

    def _share(self, waiter: _Waiter) -> tuple[int, int, float]:
        held = self._by_caller[waiter.caller]
        counted = held + self._turns_used(waiter.caller)
        return counted, held, self._by_run[waiter.run_id] / waiter.weight

    def _count(self, caller: CallerId, run_id: RunId, count: int) -> None:
        self._usage.note(caller, self._by_caller[caller])
        _add(self._by_caller, caller, count)
        _add(self._by_run, run_id, count)


def _add(counter: Counter[K], key: K, count: int) -> None:
    counter[key] += count
    if not counter[key]:
        del counter[key]
