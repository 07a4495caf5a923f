"""Tests of prefetch_each: it produces the next item while one is used, and it raises the errors of
both sides."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio
import trio.testing

from conveyor.ports.errors import Unavailable
from conveyor.usecases.run.ingest import prefetch_each


async def numbers(
    count: int, log: list[str], *, failing: bool = False
) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            log.append(f"made {number}")
            yield number
        await trio.lowlevel.checkpoint()
        if failing:
            raise Unavailable("the source went away")
    finally:
        await trio.lowlevel.checkpoint()
        log.append("closed")


async def test_each_item_is_used_once_in_order_while_the_next_is_produced() -> None:
    log: list[str] = []

    async def use(number: int) -> bool:
        await trio.testing.wait_all_tasks_blocked()
        log.append(f"used {number}")
        return True

    assert await prefetch_each(numbers(3, log), use)

    assert [entry for entry in log if "used" in entry] == ["used 0", "used 1", "used 2"]
    assert log.index("made 1") < log.index("used 0")
    assert "made 2" not in log[: log.index("used 0")]
    assert log[-1] == "closed" or log[-2] == "closed"


async def test_a_use_that_returns_false_ends_the_loop_and_closes_the_source() -> None:
    log: list[str] = []

    async def refuse(_: int) -> bool:
        return False

    assert not await prefetch_each(numbers(5, log), refuse)

    assert log[0] == "made 0"
    assert "made 3" not in log


async def test_an_error_of_the_source_is_raised_after_all_its_items_were_used() -> None:
    used: list[int] = []

    async def use(number: int) -> bool:
        used.append(number)
        return True

    with pytest.raises(Unavailable, match="went away"):
        await prefetch_each(numbers(2, [], failing=True), use)

    assert used == [0, 1]


async def test_an_error_of_a_use_is_raised() -> None:
    async def fail(_: int) -> bool:
        raise Unavailable("no room")

    with pytest.raises(Unavailable, match="no room"):
        await prefetch_each(numbers(5, []), fail)
