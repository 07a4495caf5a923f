"""The number of receives for each task of a job at its cap: real pollers with the SQS engine, on a
model in virtual time."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from bench.amplification import model
from bench.dispatch import Arm, Gate

pytestmark = pytest.mark.slow


async def test_with_permits_fifty_dispatchers_receive_each_message_once(
    autojump_clock: MockClock,
) -> None:
    drained = await model(Arm(name="permits", tasks=300))

    assert (drained.done, drained.dead) == (300, 0)
    assert drained.amplification <= 1.05


async def test_with_permits_processes_on_one_queue_receive_each_message_once(
    autojump_clock: MockClock,
) -> None:
    drained = await model(Arm(name="permits", tasks=600, cap=20, processes=4))

    assert (drained.done, drained.dead) == (600, 0)
    assert drained.amplification <= 1.05


async def test_without_permits_dispatchers_receive_each_message_many_times(
    autojump_clock: MockClock,
) -> None:
    drained = await model(Arm(name="off", gate=Gate.OFF, tasks=300))

    assert (drained.done, drained.dead) == (300, 0)
    assert drained.amplification >= 5


async def test_a_local_limit_with_a_cooldown_needs_a_moderate_number_of_receives(
    autojump_clock: MockClock,
) -> None:
    drained = await model(Arm(name="local gate", gate=Gate.LOCAL, tasks=300))

    assert (drained.done, drained.dead) == (300, 0)
    assert 1.5 < drained.amplification < 5


async def test_a_cooldown_saves_coordinator_calls_while_a_job_is_at_its_cap(
    autojump_clock: MockClock,
) -> None:
    drained = await model(Arm(name="cooldown", tasks=200, dispatchers=40))

    assert drained.messages == 200
    # A measurement gave 143 calls, and 3,713 if each poller tried again after 20 ms.
    assert drained.lease_calls < 2 * 200


async def test_a_killed_process_costs_no_more_receives_than_it_had_in_flight(
    autojump_clock: MockClock,
) -> None:
    drained = await model(Arm(name="killed", tasks=300, processes=3, killed_at=100))

    # Each message may return once while its claim is still held, and once more.
    assert (drained.done, drained.dead) == (300, 0)
    assert 300 <= drained.messages <= 300 + 2 * 5
