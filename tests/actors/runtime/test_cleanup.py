"""Bounded clean-up."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from actors.runtime import bounded_cleanup


async def test_clean_up_continues_although_the_task_is_cancelled(autojump_clock: MockClock) -> None:
    steps: list[str] = []

    with trio.move_on_after(1.0):
        try:
            await trio.sleep_forever()
        finally:
            with bounded_cleanup(5.0):
                await trio.sleep(2.0)
                steps.append("cleaned")

    assert steps == ["cleaned"]
    assert trio.current_time() == pytest.approx(3.0)


async def test_clean_up_that_exceeds_its_time_is_cancelled_and_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with bounded_cleanup(5.0, what="flush"):
        await trio.sleep_forever()

    assert trio.current_time() == pytest.approx(5.0)
    assert caplog.messages == ["flush cut off after 5.0 s"]


async def test_clean_up_in_time_logs_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with bounded_cleanup(5.0):
        await trio.sleep(1.0)

    assert caplog.messages == []


async def test_an_error_in_clean_up_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="broken"), bounded_cleanup(5.0):
        raise ValueError("broken")
