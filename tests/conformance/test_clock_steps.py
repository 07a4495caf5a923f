"""When a system clock is set, messages stay hidden and leases live for their full time (SPEC.md
4.22)."""

from __future__ import annotations

import pytest

from conveyor.domain import limits
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from tests.builders import JOB, RUN, ManualClock, a_ref
from tests.conformance.engines import Engine

HOUR_S, DAY_S = 3_600.0, 86_400.0
STEPS_S = (-40 * DAY_S, -DAY_S, -HOUR_S, HOUR_S, DAY_S, 40 * DAY_S)


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_setting_the_clock_neither_hides_a_message_nor_makes_it_visible(
    queue: Queue, clock: ManualClock, step_s: float
) -> None:
    """A received message stays hidden for its time and returns after it."""
    await queue.open_run(RUN)
    await queue.send([a_ref(0), a_ref(1)])
    await queue.receive(RUN, count_max=1, visibility_s=45)

    clock.step(step_s)
    at_once = await queue.receive(RUN, count_max=9, visibility_s=45)
    clock.advance(46)
    later = await queue.receive(RUN, count_max=9, visibility_s=45)

    assert [message.ref for message in at_once] == [a_ref(1)]
    assert {message.ref for message in later} == {a_ref(0), a_ref(1)}


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_an_unrenewed_lease_ages_out_although_the_clock_was_set(
    coordinator: Coordinator, clock: ManualClock, step_s: float
) -> None:
    """Setting the clock cannot block a place for longer than the lifetime of a lease."""
    ttl_s = limits.LEASE_TTL_S
    await coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=ttl_s)

    clock.step(step_s)
    clock.advance(ttl_s + limits.CLOCK_SKEW_S + 1)

    assert len(await coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=ttl_s)) == 1


@pytest.mark.parametrize("engine", ["embedded", "memory"], indirect=True)
@pytest.mark.parametrize("step_s", STEPS_S)
async def test_with_a_monotonic_clock_a_clock_step_neither_ends_nor_frees_a_lease(
    engine: Engine, clock: ManualClock, step_s: float
) -> None:
    held = await engine.coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30)

    clock.advance(10)
    clock.step(step_s)

    assert await engine.coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30) == []
    assert await engine.coordinator.renew(held, ttl_s=30) == frozenset()
    assert await engine.coordinator.count(RUN) == 1
