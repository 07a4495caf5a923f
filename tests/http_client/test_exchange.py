"""The deadline timer of the pool: each wait is interrupted at its deadline, and no other."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from conveyor.http_client.exchange import GRAIN_S, DeadlineTimer


class Waiting:
    """Records when it was interrupted."""

    def __init__(self, watch: DeadlineTimer) -> None:
        self._watch = watch
        self.interrupted_at: list[float] = []

    def interrupt(self) -> None:
        self.interrupted_at.append(trio.current_time())

    def until(self, seconds: float) -> Waiting:
        self._watch.expect(self, trio.current_time() + seconds)
        return self


async def test_each_wait_is_interrupted_at_its_own_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    start = trio.current_time()
    late, soon, middle = (Waiting(watch).until(seconds) for seconds in (30.0, 1.0, 5.0))
    for waiting, seconds in ((soon, 1.0), (middle, 5.0), (late, 30.0)):
        await trio.sleep_until(start + seconds + GRAIN_S / 2)
        assert waiting.interrupted_at == [pytest.approx(start + seconds)]
        watch.forget(waiting)


async def test_a_removed_or_postponed_wait_is_not_interrupted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    forgotten, postponed = Waiting(watch).until(1.0), Waiting(watch).until(1.0)
    watch.forget(forgotten)
    await trio.sleep(0.5)
    postponed.until(10.0)
    await trio.sleep(9.0)

    assert forgotten.interrupted_at == postponed.interrupted_at == []


async def test_a_shorter_wait_is_interrupted_before_an_earlier_longer_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    Waiting(watch).until(60.0)
    await trio.sleep(1.0)
    short = Waiting(watch).until(2.0)
    await trio.sleep(2.0 + GRAIN_S)

    assert len(short.interrupted_at) >= 1


async def test_a_wait_that_does_not_end_is_interrupted_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    busy = Waiting(watch).until(1.0)
    await trio.sleep(1.0 + 10.5 * GRAIN_S)
    watch.forget(busy)

    assert len(busy.interrupted_at) > 5


async def test_the_timer_runs_no_task_while_there_is_no_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    watch = DeadlineTimer()
    waiting = Waiting(watch).until(1.0)
    assert trio.lowlevel.current_statistics().tasks_living == before + 1
    watch.forget(waiting)
    await trio.sleep(2.0)

    assert trio.lowlevel.current_statistics().tasks_living == before
    again = Waiting(watch).until(1.0)
    await trio.sleep(1.5)
    assert again.interrupted_at
