"""The laws of marks: one per owner and subject, for as long as it was left for."""

from __future__ import annotations

from conveyor.ports.coordinator import Coordinator
from tests.builders import ManualClock


async def test_a_mark_stands_for_its_owner_until_that_leaves_another(
    coordinator: Coordinator,
) -> None:
    await coordinator.leave_marks("b", {"run": "b1", "workers": "here"}, ttl_s=30)
    await coordinator.leave_marks("a", {"run": "a1"}, ttl_s=30)
    await coordinator.leave_marks("b", {"run": "b2"}, ttl_s=30)

    assert await coordinator.marks_on("run") == ["a1", "b2"]
    assert await coordinator.marks_on("workers") == ["here"]
    assert await coordinator.marks_on("nothing") == []


async def test_a_mark_ages_out_after_its_time(coordinator: Coordinator, clock: ManualClock) -> None:
    await coordinator.leave_marks("a", {"run": "a1"}, ttl_s=30)
    clock.advance(20)
    await coordinator.leave_marks("b", {"run": "b1"}, ttl_s=30)

    clock.advance(9.9)
    before = await coordinator.marks_on("run")
    clock.advance(0.1)

    assert before == ["a1", "b1"]
    assert await coordinator.marks_on("run") == ["b1"]


async def test_a_mark_that_lives_no_time_takes_the_last_one_back(coordinator: Coordinator) -> None:
    await coordinator.leave_marks("a", {"run": "a1"}, ttl_s=30)

    await coordinator.leave_marks("a", {"run": ""}, ttl_s=0)

    assert await coordinator.marks_on("run") == []
