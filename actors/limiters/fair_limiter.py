"""FairLimiter: the fetch slots of this process, shared by caller, then by run (SPEC.md 4.7).

A caller that fetches slow pages must not keep the slots from other callers, however many API keys
it has. Three rules ensure that:

- A slot goes to the caller with the fewest slots. Each `TURN_S` seconds of recent slot use count
  like one held slot, up to `HEAD_START`. Within a caller the slot goes to the run that has the
  fewest for its weight. Ties go to the longest wait.
- A caller may hold at most `SHARE` times as many slots as remain free (the dynamic threshold of
  shared-memory switches). One caller alone reaches `capacity`, and half as many slots again stay
  free. With B callers, each comes to hold `SHARE / (1 + SHARE * B)` of all slots, its fair part,
  and some slots stay free for the next caller. This rule interrupts no fetch, so it also applies
  to callers of a gateway that charges.
- The second rule takes effect when slots are freed, and slow pages free none. Therefore a caller
  that has waited for `PREEMPT_AFTER_S` and holds less than its fair part, or less than its head
  start, preempts fetches of callers that hold more than their part. The latest fetch is preempted
  first, so the earlier ones complete and each caller makes progress. If no caller holds more than
  its part, the fetch that has exceeded its turn by the longest time is preempted. A turn lasts
  `TURN_S`. Among callers of similar usage it doubles with each receive of the message, so that a
  slow page is fetched eventually. A preempted task is released without an attempt. Fetches that
  are charged for are never preempted: a caller may then have to wait until a call ends.
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

# With 2, one caller alone leaves a third of all slots free. A larger value uses the slots better
# and makes a new caller wait longer for its first slots.
SHARE = 2
# How long a caller waits before fetches are preempted for it. Most pages end sooner and free a slot
# without preemption. A longer wait delays short jobs; a shorter one interrupts fetches that are
# about to end.
PREEMPT_AFTER_S = 1.5
# How long a fetch keeps its slot against waiting callers, and the unit in which past use is
# counted. A shorter turn repeats more fetches; a longer one lets slow pages delay others.
TURN_S = 3.0
# Preemption is evaluated at most this often, however many callers wait: the evaluation visits all
# waiters and callers.
PREEMPT_CHECK_S = 0.25
# Caps a turn at 96 s.
TURN_DOUBLINGS_MAX = 5
# How many turns of past use can count against a caller. A caller that was idle gets slots first
# until it has used this many turns, which suffices for a short job.
HEAD_START = 5
# Time constant with which past use decays. A silent page times out after about this long.
USAGE_S = 60.0


def slots_count(capacity: int) -> int:
    """Returns how many slots a limiter has if one caller alone may hold `capacity`."""
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
    """A fetch that may be interrupted, and how long it may keep its slot while others wait."""

    caller: CallerId
    cancel: Callable[[], None]
    began_at: float
    turn_s: float


class SlotUsage:
    """Seconds of recent slot use per caller, decaying exponentially."""

    def __init__(self) -> None:
        self._used: dict[CallerId, tuple[float, float]] = {}
        self._pruned_at = 0.0

    def read(self, caller: CallerId, held: int) -> float:
        return self._read_at(trio.current_time(), caller, held)

    def _read_at(self, now: float, caller: CallerId, held: int) -> float:
        used_s, at = self._used.get(caller, (0.0, 0.0))
        elapsed_s = now - at
        # The integral of the slots held since the last change, with exponential decay. Stored
        # values are updated only when the held count changes, not on every read.
        fading = math.exp(-elapsed_s / USAGE_S)
        return used_s * fading + held * USAGE_S * (1.0 - fading)

    def record(self, caller: CallerId, held: int) -> None:
        """Records the use so far. Call it before the number of slots that a caller holds changes
        from `held`."""
        now = trio.current_time()
        self._used[caller] = (self._read_at(now, caller, held), now)
        # After five time constants less than 1 % of the use remains, so the entry can be dropped.
        if now - self._pruned_at > USAGE_S:
            self._pruned_at = now
            old = now - 5 * USAGE_S
            self._used = {user: use for user, use in self._used.items() if use[1] > old}


class FairLimiter:
    """Slots for `capacity` tasks of one caller, and a reserve for other callers.

    `writing_max` tasks may write their outcomes without a slot; by default `capacity`.
    """

    def __init__(self, *, capacity: int, writing_max: int | None = None) -> None:
        assert capacity >= 1
        self.capacity = capacity
        self._writing_max = capacity if writing_max is None else writing_max
        self.slots_count = slots_count(capacity)
        self._free = self.slots_count
        self._writing_count = 0
        self._waiters: list[_Waiter] = []
        self._by_caller: Counter[CallerId] = Counter()
        self._by_run: Counter[RunId] = Counter()
        self._usage = SlotUsage()
        # The time since which a caller has held fewer slots than it requested.
        self._unsatisfied_since: dict[CallerId, float] = {}
        self._checked_at = -math.inf
        # Fetches that may be preempted, by caller, in the order in which they began. A dict serves
        # as an ordered set.
        self._preemptible: dict[CallerId, dict[Preemptible, None]] = {}
        # Fetches that were cancelled and still hold their slots. They count as slots that are about
        # to be free, so that the same need does not preempt twice.
        self._preempted: set[Preemptible] = set()
        self._is_draining = False
        self._drained = trio.Event()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def inflight_count(self) -> int:
        return self.slots_count - self._free

    @property
    def usable_count(self) -> int:
        """Returns how many slots the callers that have tasks now can hold together. The others
        stay free for the next caller. A new caller may get its first slot beyond this number."""
        count = max(1, len(self._active_callers()))
        return SHARE * self.slots_count * count // (1 + SHARE * count)

    def room_for(self, caller: CallerId) -> int:
        """Returns how many slots the caller could take now if no other caller waited."""
        held = self._by_caller[caller]
        # Solves held + n <= SHARE * (free - n) for n.
        room = (SHARE * self._free - held) // (1 + SHARE)
        # The first slot of a caller may use the reserve: the reserve exists for new callers.
        return max(room, 0 if held or not self._free else 1)

    @property
    def is_settling_urgent(self) -> bool:
        """Returns whether groups of settles should be written without waiting: no fetch is running,
        or the places for writing tasks are nearly all in use."""
        return self._free == self.slots_count or 4 * self._writing_count >= 3 * self._writing_max

    async def acquire(self, caller: CallerId, run_id: RunId, *, weight: int, count_max: int) -> int:
        """Waits for at least one slot and takes up to `count_max`. Returns the number taken; 0 once
        the limiter is draining."""
        assert count_max >= 1
        if self._is_draining:
            return 0
        since = self._unsatisfied_since.setdefault(caller, trio.current_time())
        waiter = _Waiter(caller, run_id, weight, count_max, since)
        self._waiters.append(waiter)
        self._grant()
        try:
            await self._wait_ready(waiter)
        # A cancelled waiter may have been granted slots before it woke. Without this release they
        # would never be free again.
        except BaseException:
            self._waiters.remove(waiter)
            self.release(caller, run_id, waiter.granted)
            raise
        self._waiters.remove(waiter)
        # A caller that got less than it requested keeps its start of waiting for the next call.
        if waiter.granted == count_max:
            self._unsatisfied_since.pop(caller, None)
        return waiter.granted

    async def _wait_ready(self, waiter: _Waiter) -> None:
        while True:
            with trio.move_on_after(PREEMPT_AFTER_S):
                await waiter.ready.wait()
                return
            self._preempt_for_waiters()

    async def drain(self) -> None:
        """Grants no more slots, and waits until all slots are free and all writes have ended."""
        self._is_draining = True
        for waiter in self._waiters:
            waiter.ready.set()
        self._check_drained()
        await self._drained.wait()

    def release(self, caller: CallerId, run_id: RunId, count: int) -> None:
        """Returns slots and grants them to the waiters by the rules above."""
        if count == 0:
            return
        self._free += count
        self._count(caller, run_id, -count)
        assert self._free <= self.slots_count
        self._grant()
        self._check_drained()

    def begin_write(self, caller: CallerId, run_id: RunId) -> bool:
        """Frees the slot of a task that only has to write its outcome. Returns False if
        `writing_max` tasks are writing already: that bounds what a crash would lose."""
        if self._writing_count == self._writing_max:
            return False
        self._writing_count += 1
        self.release(caller, run_id, 1)
        return True

    def end_write(self) -> None:
        """Ends the write of a task for which `begin_write` returned True."""
        assert self._writing_count
        self._writing_count -= 1
        self._check_drained()

    def allow_preemption(
        self, caller: CallerId, cancel: Callable[[], None], *, receives: int
    ) -> Preemptible:
        """From now on the limiter may interrupt the fetch in this slot by calling `cancel`."""
        # Each redelivery doubles the turn, so that a page slower than TURN_S completes eventually.
        doublings = min(max(receives, 1) - 1, TURN_DOUBLINGS_MAX)
        fetch = Preemptible(caller, cancel, trio.current_time(), TURN_S * 2.0**doublings)
        self._preemptible.setdefault(caller, {})[fetch] = None
        return fetch

    def forbid_preemption(self, fetch: Preemptible) -> None:
        """Ends the registration: the fetch has ended or its slot is released. Safe to repeat."""
        self._preempted.discard(fetch)
        self._forget(fetch)

    def _forget(self, fetch: Preemptible) -> None:
        fetches = self._preemptible.get(fetch.caller)
        if fetches is not None:
            fetches.pop(fetch, None)
            if not fetches:
                del self._preemptible[fetch.caller]

    def _preempt_for_waiters(self) -> None:
        """Interrupts as many fetches as are needed for all callers that have waited for
        `PREEMPT_AFTER_S`."""
        now = trio.current_time()
        if self._is_draining or now - self._checked_at < PREEMPT_CHECK_S:
            return
        self._checked_at = now
        callers = self._active_callers()
        # Drop callers that neither wait nor hold slots, or the dict would grow without bound.
        since = self._unsatisfied_since
        self._unsatisfied_since = {caller: at for caller, at in since.items() if caller in callers}
        fair = max(1, SHARE * self.slots_count // (1 + SHARE * len(callers)))
        needed = self._slots_needed(fair) - self._free - len(self._preempted)
        for _ in range(needed):
            fetch = self._latest_of_largest(fair) or self._longest_beyond_turn()
            if fetch is None:
                return
            self._forget(fetch)
            self._preempted.add(fetch)
            # A stable sort moves the waiters of the preempted caller to the end. Otherwise the
            # freed slot could return to the same caller.
            self._waiters.sort(key=lambda waiter: waiter.caller == fetch.caller)
            fetch.cancel()

    def _active_callers(self) -> set[CallerId]:
        """Returns the callers that hold slots or wait for one."""
        return {waiter.caller for waiter in self._waiters} | self._by_caller.keys()

    def _slots_needed(self, fair: int) -> int:
        """Returns how many slots must be free so that callers who have waited for PREEMPT_AFTER_S
        reach their fair part: the slots that they take, and those that must remain free beside them
        by `SHARE`."""
        latest_since = trio.current_time() - PREEMPT_AFTER_S
        requested: Counter[CallerId] = Counter()
        for waiter in self._waiters:
            if not waiter.granted and waiter.since <= latest_since:
                requested[waiter.caller] += waiter.count_max
        taken = remaining = 0
        for caller, count in requested.items():
            held = self._by_caller[caller]
            part = max(fair, HEAD_START - self._turns_used(caller))
            more = min(count, part - held)
            if more > 0:
                taken += more
                remaining = max(remaining, -(-(held + more) // SHARE) if held + more > 1 else 0)
        return taken + remaining

    def _latest_of_largest(self, fair: int) -> Preemptible | None:
        # Cancelled fetches still count in `_by_caller` until they release their slots.
        leaving = Counter(fetch.caller for fetch in self._preempted)
        largest = max(
            self._preemptible,
            key=lambda caller: self._by_caller[caller] - leaving[caller],
            default=None,
        )
        if largest is None or self._by_caller[largest] - leaving[largest] <= fair:
            return None
        return next(reversed(self._preemptible[largest]))

    def _longest_beyond_turn(self) -> Preemptible | None:
        least_s = min(self._used_s(waiter.caller) for waiter in self._waiters)
        # The first fetch of each caller began earliest, so no other fetch of that caller has run
        # longer.
        firsts = [next(iter(fetches)) for fetches in self._preemptible.values()]
        longest = max(firsts, key=lambda fetch: self._overstay_s(fetch, least_s), default=None)
        if longest is None or self._overstay_s(longest, least_s) < 0:
            return None
        return longest

    def _overstay_s(self, fetch: Preemptible, least_s: float) -> float:
        """Returns by how many seconds a fetch has exceeded its turn, judged for the waiting caller
        with the least use. Against a caller that has used less than half as much, a turn is not
        doubled."""
        has_used_less = 2 * least_s < self._used_s(fetch.caller)
        turn_s = TURN_S if has_used_less else fetch.turn_s
        return trio.current_time() - fetch.began_at - turn_s

    def _turns_used(self, caller: CallerId) -> int:
        return min(int(self._used_s(caller) / TURN_S), HEAD_START)

    def _used_s(self, caller: CallerId) -> float:
        return self._usage.read(caller, self._by_caller[caller])

    def _check_drained(self) -> None:
        if self._is_draining and self._free == self.slots_count and not self._writing_count:
            self._drained.set()

    def _grant(self) -> None:
        """Grants free slots. A waiter stays in the list until it wakes, so that slots freed in the
        meantime add to its own."""
        if self._is_draining:
            return
        waiters = self._waiters_short_of_slots() if self._free else []
        while waiters:
            waiter = waiters[0] if len(waiters) == 1 else min(waiters, key=self._share)
            room = self.room_for(waiter.caller)
            # One slot at a time while several wait, because each grant changes the order. A single
            # waiter can take all at once.
            count = min(room, waiter.count_max - waiter.granted) if len(waiters) == 1 else 1
            waiter.granted += count
            waiter.ready.set()
            self._free -= count
            self._count(waiter.caller, waiter.run_id, count)
            waiters = self._waiters_short_of_slots()

    def _waiters_short_of_slots(self) -> list[_Waiter]:
        """Returns the waiters that want more slots and may have more."""
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
        self._usage.record(caller, self._by_caller[caller])
        _add(self._by_caller, caller, count)
        _add(self._by_run, run_id, count)


def _add(counter: Counter[K], key: K, count: int) -> None:
    counter[key] += count
    # Counter keeps zero entries. Callers and runs come and go, so the dict would grow without
    # bound.
    if not counter[key]:
        del counter[key]
