"""Live streams of the same page share its rendering, which leaves time for other work."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from conveyor.ui.live import SharedFragments, make_stand_ins
from tests.ui.world import Browser, make_ui_world


@dataclass(slots=True)
class Builder:
    """A page that takes some time to build and counts its builds."""

    takes_s: float = 0.01
    built_at: list[float] = field(default_factory=list)

    async def __call__(self) -> dict[str, str]:
        self.built_at.append(trio.current_time())
        await trio.sleep(self.takes_s)
        return {"live_x": str(len(self.built_at))}


async def test_streams_of_one_page_build_it_once(autojump_clock: MockClock) -> None:
    shared, build = SharedFragments(), Builder()

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(shared.get, "anna", "page", build)
    first = len(build.built_at)
    await trio.sleep(1)
    second = await shared.get("anna", "page", build)

    assert (first, second) == (1, {"live_x": "2"})


async def test_a_page_that_is_slow_to_build_is_still_built_every_other_second(
    autojump_clock: MockClock,
) -> None:
    shared, build = SharedFragments(), Builder(takes_s=0.6)

    while trio.current_time() < 60:
        await shared.get("anna", "page", build)
        await trio.sleep(0.1)

    assert len(build.built_at) >= 30


async def test_one_page_of_a_caller_is_built_at_a_time_with_pauses(
    autojump_clock: MockClock,
) -> None:
    shared, build = SharedFragments(), Builder(takes_s=0.02)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(shared.get, "anna", f"page {number}", build)

    # Each build takes 0.02 s and is followed by ten times as much.
    assert 9 * 0.22 <= build.built_at[-1] - build.built_at[0] < 9 * 0.23


async def test_many_pages_of_one_caller_do_not_delay_those_of_another(
    autojump_clock: MockClock,
) -> None:
    shared, hers, his = SharedFragments(), Builder(), Builder()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(shared.get, "anna", f"page {number}", hers)
        await trio.sleep(0.02)
        await shared.get("bert", "page", his)
        ended_at = trio.current_time()

    assert ended_at - his.built_at[0] < 0.1


async def test_a_page_is_never_shared_with_another_caller(autojump_clock: MockClock) -> None:
    shared, hers, his = SharedFragments(), Builder(), Builder()

    await shared.get("anna", "page", hers)
    await shared.get("bert", "page", his)

    assert (len(hers.built_at), len(his.built_at)) == (1, 1)


async def test_visitors_who_share_a_page_get_their_own_tokens() -> None:
    """The shared blocks contain placeholders that no text of a caller can contain."""
    world = make_ui_world()
    anna = Browser(world)
    await anna.sign_in()
    await anna.open("/ui/system")
    stand_ins = make_stand_ins(world.env)
    shared = {"live_form": f'value="{stand_ins.token}" value="{stand_ins.once}"'}

    filled = stand_ins.fill(shared, {"token": anna.token, "once": "once-1"})

    assert filled == {"live_form": f'value="{anna.token}" value="once-1"'}
    assert make_stand_ins(world.env) != stand_ins
