"""The alarm clock of the pool: each wait is ended at its moment, and no other."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from conveyor.http_client.exchange import GRAIN_S, DeadlineTimer


class Waiting:
    """Remembers when it was interrupted."""

    def __init__(self, watch: DeadlineTimer) -> None:
        self._watch = watch
        self.interrupted_at: list[float] = []

    def interrupt(self) -> None:
        self.interrupted_at.append(trio.current_time())

    def until(self, seconds: float) -> Waiting:
        self._watch.expect(self, trio.current_time() + seconds)
        return self


async def test_each_wait_ends_at_its_own_moment(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    start = trio.current_time()
    late, soon, middle = (Waiting(watch).until(seconds) for seconds in (30.0, 1.0, 5.0))
    for waiting, seconds in ((soon, 1.0), (middle, 5.0), (late, 30.0)):
        await trio.sleep_until(start + seconds + GRAIN_S / 2)
        assert waiting.interrupted_at == [pytest.approx(start + seconds)]
        watch.forget(waiting)


async def test_what_is_forgotten_or_expected_later_is_left_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    forgotten, postponed = Waiting(watch).until(1.0), Waiting(watch).until(1.0)
    watch.forget(forgotten)
    await trio.sleep(0.5)
    postponed.until(10.0)
    await trio.sleep(9.0)

    assert forgotten.interrupted_at == postponed.interrupted_at == []


async def test_a_shorter_wait_rings_before_a_longer_one_that_was_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    Waiting(watch).until(60.0)
    await trio.sleep(1.0)
    short = Waiting(watch).until(2.0)
    await trio.sleep(2.0 + GRAIN_S)

    assert len(short.interrupted_at) >= 1


async def test_who_does_not_listen_is_interrupted_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = DeadlineTimer()
    deaf = Waiting(watch).until(1.0)
    await trio.sleep(1.0 + 10.5 * GRAIN_S)
    watch.forget(deaf)

    assert len(deaf.interrupted_at) > 5


async def test_with_nothing_to_wait_for_there_is_no_task(
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
