"""FairGate: slots go to the caller with the fewest, then to the run with the fewest."""

from __future__ import annotations

from collections import Counter

import trio
from trio.testing import wait_all_tasks_blocked

from actors.gate import FairGate
from conveyor.domain.ids import CallerId, RunId

A, B = CallerId("a"), CallerId("b")


async def test_a_lone_waiter_takes_as_much_as_it_wants_and_there_is() -> None:
    gate = FairGate(capacity=10)

    assert await gate.take(A, RunId("1"), weight=1, count_max=4) == 4
    assert await gate.take(A, RunId("1"), weight=1, count_max=50) == 6
    assert gate.inflight_count == 10


async def test_freed_slots_go_to_the_caller_that_has_fewer() -> None:
    gate = FairGate(capacity=4)
    await gate.take(A, RunId("1"), weight=1, count_max=4)
    granted: Counter[str] = Counter()

    async def wait(caller: CallerId, run_id: RunId) -> None:
        taken = await gate.take(caller, run_id, weight=1, count_max=4)
        granted[caller] += taken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, A, RunId("1"))
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, B, RunId("2"))
        await wait_all_tasks_blocked()
        gate.give_back(A, RunId("1"), 2)
        await wait_all_tasks_blocked()
        assert granted == {B: 2}
        nursery.cancel_scope.cancel()


async def test_a_callers_hundred_runs_share_one_callers_part() -> None:
    gate = FairGate(capacity=20)
    granted: Counter[str] = Counter()
    await gate.take(CallerId("c"), RunId("0"), weight=1, count_max=20)

    async def wait(caller: CallerId, run_id: RunId) -> None:
        taken = await gate.take(caller, run_id, weight=1, count_max=50)
        granted[caller] += taken

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(wait, A, RunId(f"a{number}"))
        nursery.start_soon(wait, B, RunId("b"))
        await wait_all_tasks_blocked()
        gate.give_back(CallerId("c"), RunId("0"), 20)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert granted == {A: 10, B: 10}


async def test_a_run_of_twice_the_weight_gets_twice_the_slots() -> None:
    gate = FairGate(capacity=30)
    granted: Counter[str] = Counter()
    await gate.take(B, RunId("0"), weight=1, count_max=30)

    async def wait(run_id: RunId, weight: int) -> None:
        taken = await gate.take(A, run_id, weight=weight, count_max=50)
        granted[run_id] += taken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, RunId("light"), 1)
        nursery.start_soon(wait, RunId("heavy"), 2)
        await wait_all_tasks_blocked()
        gate.give_back(B, RunId("0"), 30)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert granted == {"light": 10, "heavy": 20}


async def test_a_cancelled_waiter_leaves_its_slots_to_others() -> None:
    gate = FairGate(capacity=1)
    await gate.take(A, RunId("1"), weight=1, count_max=1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: gate.take(A, RunId("2"), weight=1, count_max=1))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    gate.give_back(A, RunId("1"), 1)

    assert gate.inflight_count == 0
    assert await gate.take(B, RunId("3"), weight=1, count_max=1) == 1


async def test_a_task_that_steps_aside_makes_room_for_another() -> None:
    gate = FairGate(capacity=1)
    await gate.take(A, RunId("1"), weight=1, count_max=1)

    assert gate.step_aside(A, RunId("1"))

    assert await gate.take(B, RunId("2"), weight=1, count_max=1) == 1


async def test_no_more_step_aside_than_there_are_slots() -> None:
    gate = FairGate(capacity=1)
    await gate.take(A, RunId("1"), weight=1, count_max=1)
    gate.step_aside(A, RunId("1"))
    await gate.take(A, RunId("1"), weight=1, count_max=1)

    assert not gate.step_aside(A, RunId("1"))
    gate.leave()
    assert gate.step_aside(A, RunId("1"))


async def test_a_gate_that_drains_lets_nobody_in_and_waits_for_the_last_to_leave() -> None:
    gate = FairGate(capacity=2)
    await gate.take(A, RunId("1"), weight=1, count_max=2)
    gate.step_aside(A, RunId("1"))
    is_empty = trio.Event()
    granted: list[int] = []

    async def drain() -> None:
        await gate.drain()
        is_empty.set()

    async def wait() -> None:
        granted.append(await gate.take(B, RunId("2"), weight=1, count_max=1))

    await gate.take(B, RunId("2"), weight=1, count_max=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        nursery.start_soon(drain)
        await wait_all_tasks_blocked()
        assert granted == [0]
        gate.give_back(A, RunId("1"), 1)
        gate.give_back(B, RunId("2"), 1)
        await wait_all_tasks_blocked()
        assert not is_empty.is_set()
        gate.leave()

    assert is_empty.is_set()
    assert await gate.take(A, RunId("1"), weight=1, count_max=1) == 0
    assert gate.inflight_count == 0


async def test_an_empty_gate_drains_at_once() -> None:
    with trio.fail_after(1):
        await FairGate(capacity=1).drain()
