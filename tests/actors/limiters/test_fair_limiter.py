"""FairLimiter: slots go to the caller with the fewest, then to the run with the fewest. A reserve
and preemption keep slots for a caller that has none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.limiters.fair_limiter import PREEMPT_AFTER_S, TURN_S, FairLimiter
from conveyor.domain.ids import CallerId, RunId

A, B = CallerId("a"), CallerId("b")


async def test_a_single_waiter_gets_all_the_slots_it_asks_for_that_are_free() -> None:
    limiter = FairLimiter(capacity=10)

    assert await limiter.acquire(A, RunId("1"), weight=1, count_max=4) == 4
    assert await limiter.acquire(A, RunId("1"), weight=1, count_max=50) == 6
    assert limiter.inflight_count == 10


async def test_one_caller_leaves_slots_to_others() -> None:
    limiter = FairLimiter(capacity=200)

    assert await limiter.acquire(A, RunId("1"), weight=1, count_max=10_000) == 200
    assert not limiter.room_for(A)
    assert await limiter.acquire(B, RunId("2"), weight=1, count_max=10) == 10


@pytest.mark.parametrize("capacity", [*range(1, 12), 199, 200, 10_000])
async def test_a_caller_alone_has_all_of_the_capacity(capacity: int) -> None:
    assert await FairLimiter(capacity=capacity).acquire(
        A, RunId("1"), weight=1, count_max=10**6
    ) == (capacity)


@pytest.mark.parametrize("capacity", [1, 2, 7, 50, 200])
@pytest.mark.parametrize("count", [1, 2, 5])
async def test_callers_that_take_all_they_can_use_all_usable_slots(
    capacity: int, count: int
) -> None:
    limiter = FairLimiter(capacity=capacity)
    assert limiter.usable_count == capacity
    callers = [CallerId(f"caller {number}") for number in range(count)]

    async def hold_slots(caller: CallerId) -> None:
        while True:
            await limiter.acquire(caller, RunId(caller), weight=1, count_max=1)

    async with trio.open_nursery() as nursery:
        for caller in callers:
            nursery.start_soon(hold_slots, caller)
        await wait_all_tasks_blocked()
        used, usable = limiter.inflight_count, limiter.usable_count
        nursery.cancel_scope.cancel()

    # Slots are whole: each caller can miss its share by one, and its first slot may exceed it.
    assert abs(used - usable) <= count


async def test_freed_slots_go_to_the_caller_with_the_fewest() -> None:
    limiter = FairLimiter(capacity=4)
    granted: Counter[str] = Counter()

    async def hold_slots(caller: CallerId, run_id: RunId) -> None:
        while True:
            taken = await limiter.acquire(caller, run_id, weight=1, count_max=6)
            granted[caller] += taken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_slots, A, RunId("1"))
        await wait_all_tasks_blocked()
        nursery.start_soon(hold_slots, B, RunId("2"))
        await wait_all_tasks_blocked()
        assert granted == {A: 4, B: 1}
        limiter.release(A, RunId("1"), 2)
        await wait_all_tasks_blocked()
        assert granted == {A: 4, B: 2}
        nursery.cancel_scope.cancel()


async def test_a_hundred_runs_of_one_caller_share_the_part_of_one_caller() -> None:
    limiter = FairLimiter(capacity=20)
    granted: Counter[str] = Counter()

    async def hold_slots(caller: CallerId, run_id: RunId) -> None:
        while True:
            taken = await limiter.acquire(caller, run_id, weight=1, count_max=50)
            granted[caller] += taken

    await limiter.acquire(CallerId("c"), RunId("0"), weight=1, count_max=20)
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(hold_slots, A, RunId(f"a{number}"))
        nursery.start_soon(hold_slots, B, RunId("b"))
        await wait_all_tasks_blocked()
        limiter.release(CallerId("c"), RunId("0"), 20)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert granted == {A: 12, B: 12}


async def test_a_run_of_twice_the_weight_gets_twice_the_slots() -> None:
    limiter = FairLimiter(capacity=30)
    granted: Counter[str] = Counter()
    await limiter.acquire(A, RunId("0"), weight=1, count_max=30)

    async def hold_slots(run_id: RunId, weight: int) -> None:
        while True:
            taken = await limiter.acquire(A, run_id, weight=weight, count_max=50)
            granted[run_id] += taken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_slots, RunId("light"), 1)
        nursery.start_soon(hold_slots, RunId("heavy"), 2)
        await wait_all_tasks_blocked()
        limiter.release(A, RunId("0"), 30)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert granted == {"light": 10, "heavy": 20}


@dataclass(slots=True, eq=False)
class Pages:
    """Callers whose fetches never end by themselves; `interrupted` lists the preempted ones."""

    limiter: FairLimiter
    nursery: trio.Nursery
    is_paid: bool = False
    begun: Counter[CallerId] = field(default_factory=Counter)
    interrupted: list[tuple[CallerId, int]] = field(default_factory=list)

    async def hold_slots(self, caller: CallerId) -> None:
        while True:
            slots = await self.limiter.acquire(caller, RunId(caller), weight=1, count_max=50)
            for _ in range(slots):
                self.nursery.start_soon(self._fetch, caller)

    async def _fetch(self, caller: CallerId) -> None:
        number, self.begun[caller] = self.begun[caller], self.begun[caller] + 1
        fetch = None
        with trio.CancelScope() as scope:
            if not self.is_paid:
                fetch = self.limiter.allow_preemption(caller, scope.cancel, receives=1)
            await trio.sleep_forever()
        self.interrupted.append((caller, number))
        assert fetch is not None
        self.limiter.forbid_preemption(fetch)
        self.limiter.release(caller, RunId(caller), 1)


@pytest.mark.parametrize("callers_count", [1, 5, 40, 100])
async def test_a_small_caller_soon_has_slots_beside_many_large_callers(
    callers_count: int, autojump_clock: MockClock
) -> None:
    limiter = FairLimiter(capacity=200)
    async with trio.open_nursery() as nursery:
        pages = Pages(limiter, nursery)
        for number in range(callers_count):
            nursery.start_soon(pages.hold_slots, CallerId(f"greedy-{number:03}"))
        await wait_all_tasks_blocked()
        held = 0
        with trio.move_on_after(2.5 * PREEMPT_AFTER_S):
            while held < 10:
                held += await limiter.acquire(A, RunId("1"), weight=1, count_max=10 - held)
        nursery.cancel_scope.cancel()

    assert held >= min(10, 2 * limiter.slots_count // (1 + 2 * (callers_count + 1)))


async def test_the_latest_fetches_of_the_largest_holder_are_interrupted(
    autojump_clock: MockClock,
) -> None:
    limiter = FairLimiter(capacity=30)
    async with trio.open_nursery() as nursery:
        pages = Pages(limiter, nursery)
        for name in "def":
            nursery.start_soon(pages.hold_slots, CallerId(name))
        await trio.sleep(20 * PREEMPT_AFTER_S)
        nursery.cancel_scope.cancel()

    first = max(Counter(caller for caller, _ in pages.interrupted).items(), key=itemgetter(1))[0]
    numbers = [number for caller, number in pages.interrupted if caller == first]
    assert numbers
    assert 0 not in numbers


async def test_callers_within_their_fair_part_are_not_preempted(
    autojump_clock: MockClock,
) -> None:
    limiter = FairLimiter(capacity=30)
    async with trio.open_nursery() as nursery:
        pages = Pages(limiter, nursery)
        for name in "def":
            nursery.start_soon(pages.hold_slots, CallerId(name))
        await trio.sleep(4 * PREEMPT_AFTER_S)
        settled_count = len(pages.interrupted)
        await trio.sleep(100 * PREEMPT_AFTER_S)
        assert len(pages.interrupted) == settled_count
        nursery.cancel_scope.cancel()


async def test_a_paid_fetch_is_never_interrupted(autojump_clock: MockClock) -> None:
    limiter = FairLimiter(capacity=1)
    async with trio.open_nursery() as nursery:
        pages = Pages(limiter, nursery, is_paid=True)
        for name in "de":
            nursery.start_soon(pages.hold_slots, CallerId(name))
        await wait_all_tasks_blocked()
        with trio.move_on_after(100 * TURN_S) as waiting:
            await limiter.acquire(A, RunId("1"), weight=1, count_max=1)
        nursery.cancel_scope.cancel()

    assert waiting.cancelled_caught
    assert not pages.interrupted


async def test_callers_take_turns_if_there_are_more_callers_than_slots(
    autojump_clock: MockClock,
) -> None:
    limiter = FairLimiter(capacity=2)
    async with trio.open_nursery() as nursery:
        pages = Pages(limiter, nursery)
        for name in "def":
            nursery.start_soon(pages.hold_slots, CallerId(name))
        await wait_all_tasks_blocked()
        assert limiter.inflight_count == limiter.slots_count
        with trio.fail_after(TURN_S + PREEMPT_AFTER_S):
            assert await limiter.acquire(A, RunId("1"), weight=1, count_max=5) == 1
        nursery.cancel_scope.cancel()


async def test_a_fetch_that_was_preempted_before_runs_longer_the_next_time(
    autojump_clock: MockClock,
) -> None:
    limiter = FairLimiter(capacity=1)
    interrupted: list[CallerId] = []
    busy = CallerId("busy")
    await limiter.acquire(busy, RunId("c"), weight=1, count_max=1)
    await limiter.acquire(A, RunId("1"), weight=1, count_max=1)
    await trio.sleep(10 * TURN_S)
    limiter.release(busy, RunId("c"), 1)
    await limiter.acquire(B, RunId("2"), weight=1, count_max=1)
    began_at = trio.current_time()

    def interrupt(caller: CallerId, run_id: RunId) -> None:
        interrupted.append(caller)
        limiter.release(caller, run_id, 1)

    limiter.allow_preemption(A, partial(interrupt, A, RunId("1")), receives=3)
    limiter.allow_preemption(B, partial(interrupt, B, RunId("2")), receives=2)
    await limiter.acquire(busy, RunId("c"), weight=1, count_max=1)

    assert interrupted == [B]
    assert 2 * TURN_S <= trio.current_time() - began_at <= 2 * TURN_S + PREEMPT_AFTER_S


async def test_a_cancelled_waiter_leaves_its_slots_to_others() -> None:
    limiter = FairLimiter(capacity=1)
    await limiter.acquire(A, RunId("1"), weight=1, count_max=1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: limiter.acquire(A, RunId("2"), weight=1, count_max=1))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    limiter.release(A, RunId("1"), 1)

    assert limiter.inflight_count == 0
    assert await limiter.acquire(B, RunId("3"), weight=1, count_max=1) == 1


@pytest.mark.parametrize("is_cancelled_first", [False, True])
async def test_a_slot_granted_to_a_waiter_at_its_cancellation_is_not_lost(
    is_cancelled_first: bool,
) -> None:
    limiter = FairLimiter(capacity=1)
    taken = await limiter.acquire(A, RunId("1"), weight=1, count_max=100)

    async def take_and_give_back() -> None:
        count = await limiter.acquire(A, RunId("2"), weight=1, count_max=1)
        try:
            await trio.lowlevel.checkpoint()
        finally:
            limiter.release(A, RunId("2"), count)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_and_give_back)
        await wait_all_tasks_blocked()
        if is_cancelled_first:
            nursery.cancel_scope.cancel()
        limiter.release(A, RunId("1"), taken)  # This grants the slot before the waiter can run.
        nursery.cancel_scope.cancel()

    assert limiter.inflight_count == 0
    assert await limiter.acquire(A, RunId("3"), weight=1, count_max=100) == taken


async def test_a_task_that_starts_to_write_frees_its_slot() -> None:
    limiter = FairLimiter(capacity=1)
    await limiter.acquire(A, RunId("1"), weight=1, count_max=1)

    assert limiter.begin_write(A, RunId("1"))

    assert await limiter.acquire(B, RunId("2"), weight=1, count_max=1) == 1


async def test_the_number_of_writing_tasks_is_limited_to_what_one_caller_may_fetch() -> None:
    limiter = FairLimiter(capacity=1)
    await limiter.acquire(A, RunId("1"), weight=1, count_max=1)
    limiter.begin_write(A, RunId("1"))
    await limiter.acquire(A, RunId("1"), weight=1, count_max=1)

    assert not limiter.begin_write(A, RunId("1"))
    limiter.end_write()
    assert limiter.begin_write(A, RunId("1"))


async def test_a_draining_limiter_grants_no_slot_and_waits_for_the_last_release() -> None:
    limiter = FairLimiter(capacity=2)
    await limiter.acquire(A, RunId("1"), weight=1, count_max=2)
    limiter.begin_write(A, RunId("1"))
    is_empty = trio.Event()
    granted: list[int] = []

    async def drain() -> None:
        await limiter.drain()
        is_empty.set()

    async def wait() -> None:
        granted.append(await limiter.acquire(B, RunId("2"), weight=1, count_max=1))

    await limiter.acquire(B, RunId("2"), weight=1, count_max=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        nursery.start_soon(drain)
        await wait_all_tasks_blocked()
        assert granted == [0]
        limiter.release(A, RunId("1"), 1)
        limiter.release(B, RunId("2"), 1)
        await wait_all_tasks_blocked()
        assert not is_empty.is_set()
        limiter.end_write()

    assert is_empty.is_set()
    assert await limiter.acquire(A, RunId("1"), weight=1, count_max=1) == 0
    assert limiter.inflight_count == 0


async def test_a_limiter_without_slots_in_use_drains_at_once() -> None:
    with trio.fail_after(1):
        await FairLimiter(capacity=1).drain()
