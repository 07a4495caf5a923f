"""Streams of the same page share its building, and a slow page is built less often."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from conveyor.ui.live import SharedFragments


async def test_streams_of_one_page_build_it_once(autojump_clock: MockClock) -> None:
    shared, built = SharedFragments(), []

    async def build() -> dict[str, str]:
        built.append(trio.current_time())
        await trio.sleep(0.01)
        return {"live_x": str(len(built))}

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(shared.get, "page", build)
    first = len(built)
    await trio.sleep(1)
    second = await shared.get("page", build)

    assert (first, second) == (1, {"live_x": "2"})


async def test_a_page_that_is_slow_to_build_is_built_less_often(autojump_clock: MockClock) -> None:
    shared, built = SharedFragments(), []

    async def build() -> dict[str, str]:
        built.append(trio.current_time())
        await trio.sleep(0.2)
        return {}

    await shared.get("page", build)
    await trio.sleep(4.9)
    await shared.get("page", build)
    before = len(built)
    await trio.sleep(0.2)
    await shared.get("page", build)

    assert (before, len(built)) == (1, 2)
