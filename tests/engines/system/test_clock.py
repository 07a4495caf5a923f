"""The clocks."""

from __future__ import annotations

import time

import trio
from trio.testing import MockClock

from conveyor.engines.system import SystemClock, VirtualClock
from conveyor.ports.clock import Clock


def test_the_system_clock_returns_epoch_seconds() -> None:
    clock: Clock = SystemClock()

    before, now, after = time.time(), clock.now(), time.time()

    assert before <= now <= after


async def test_the_virtual_clock_follows_trios_clock(autojump_clock: MockClock) -> None:
    clock: Clock = VirtualClock(epoch_s=1_700_000_000.0)
    start = clock.now()

    await trio.sleep(3600)

    assert start == 1_700_000_000.0
    assert clock.now() == start + 3600
