"""Browsers that end, hang and grow under load (docs/gateway.md, Browsers)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.gateway.browser.pool import measure_groups
from conveyor.gateway.guarding_proxy import GuardingProxy
from tests.gateway.browsers import a_rendering, running_pool
from tests.gateway.conftest import needs_chromium
from tests.gateway.site import LocalSite

pytestmark = [pytest.mark.slow, needs_chromium]


def a_proxy() -> GuardingProxy:
    return GuardingProxy(TargetPolicy(allow_private=True))


async def test_no_page_is_lost_when_browsers_are_killed_under_load(site: LocalSite) -> None:
    pages: list[bytes] = []
    killed: list[int] = []
    randomness = random.Random(1)

    async with running_pool(a_proxy(), pages_max=4) as pool:

        async def render_some() -> None:
            for _ in range(3):
                page = await pool.render(a_rendering(f"{site.url}/", {"wait_for": ".product"}))
                pages.append(page.body)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(render_some)
            while len(killed) < 3:
                while not set(pool.browser_ids) - set(killed):
                    await trio.sleep(0.05)
                done_count = len(pages)
                killed.append(randomness.choice(sorted(set(pool.browser_ids) - set(killed))))
                os.killpg(killed[-1], signal.SIGKILL)
                while len(pages) < min(done_count + 2, 12):
                    await trio.sleep(0.05)
        started_count = pool.started_count

    assert len(pages) == 12
    assert all(body.count(b"thing ") == 20 for body in pages)
    assert started_count >= len(killed)


async def test_a_cancelled_call_ends_its_page_and_frees_its_place(site: LocalSite) -> None:
    endless = {"js_instructions": '[{"wait": 30000}]'}
    async with running_pool(a_proxy(), pages_max=1) as pool:
        await pool.render(a_rendering(f"{site.url}/"))
        with trio.move_on_after(1.0):
            await pool.render(a_rendering(f"{site.url}/", endless))

        page = await pool.render(a_rendering(f"{site.url}/"))

        assert b"thing 19" in page.body
        assert pool.started_count == 1


async def test_a_browser_above_its_memory_is_replaced_and_its_page_survives(
    site: LocalSite,
) -> None:
    async with running_pool(a_proxy()) as pool:
        await pool.render(a_rendering(f"{site.url}/"))
        (memory,) = measure_groups(frozenset(pool.browser_ids)).values()
    async with running_pool(a_proxy(), memory_mb_max=memory.size_bytes * 3 // 4 // 1024**2) as pool:
        pages = [await pool.render(a_rendering(f"{site.url}/", {"wait": "2500"}))]
        pages.append(await pool.render(a_rendering(f"{site.url}/")))
        started_count = pool.started_count

    assert all(b"thing 19" in page.body for page in pages)
    assert started_count >= 2


async def test_the_processes_of_a_browser_end_with_the_pool(site: LocalSite) -> None:
    async with running_pool(a_proxy()) as pool:
        await pool.render(a_rendering(f"{site.url}/"))
        (group_id,) = pool.browser_ids

    # A process that was killed ends a moment later.
    with trio.fail_after(10):
        while list(_living(group_id)):
            await trio.sleep(0.01)


def _living(group_id: int) -> Iterator[int]:
    """The processes of a group, without those that have ended and that nobody has waited for."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, _, group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(group) == group_id and state not in {"Z", "X"}:
                    yield int(folder.name)
