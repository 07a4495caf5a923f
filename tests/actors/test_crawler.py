"""The crawler: it advances due crawls, a few at once, and continues after crashes and outages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.crawl_record import Crawl, CrawlRules, CrawlStatus
from conveyor.domain.errors import make_problem
from conveyor.domain.ids import CallerId
from conveyor.domain.model import FailureReason
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import NotScraped, Outcome, ScrapeRequest
from conveyor.usecases import crawl as crawls
from conveyor.usecases.submit.jobs import Submission
from tests.actors.world import CALLER, World, a_page, make_world

PAGES = 40


def a_site(request: ScrapeRequest, attempt: int) -> Outcome:
    """Each page leads to the next two; every seventh fails at first."""
    name = request.url.rpartition("/")[2]
    if not name.isdigit() or int(name) >= PAGES:
        problem = make_problem("target_not_found", "There is no such page", 404)
        return NotScraped(reason=FailureReason.BAD_TARGET, problem=problem, retryable=False)
    if int(name) % 7 == 0 and attempt == 1:
        problem = make_problem("target_error", "The site failed", 503)
        return NotScraped(reason=FailureReason.GATEWAY_ERROR, problem=problem, retryable=True)
    links = "".join(f"<a href='/{int(name) + step}'>" for step in (1, 2))
    return a_page(links.encode())


async def start_crawl(
    world: World, host: str = "example.com", *, caller: CallerId = CALLER, pages_max: int = 1000
) -> Crawl:
    rules = CrawlRules(max_items=pages_max, max_pages=pages_max)
    return await crawls.create(
        world.env,
        caller,
        f"https://{host}/0",
        rules,
        Submission(is_open=True),
        job_id=world.env.new_id(),
    )


async def wait_for_end(world: World, crawl: Crawl) -> Crawl:
    with trio.fail_after(3600):
        while True:
            row = await crawls.of_job(world.env, crawl.job_id)
            assert row is not None
            if row.finished_at is not None and row.due_at is None:
                return row
            await trio.sleep(0.5)


async def items_of(world: World, crawl: Crawl) -> set[str]:
    pages, _, _ = await crawls.load_kept_pages(world.env, crawl, step=0, skip=0, limit=1000)
    return {page.url.rpartition("/")[2] for page in pages}


EXPECTED = {str(number) for number in range(PAGES + 2)}


async def test_many_crawls_are_advanced_concurrently(autojump_clock: MockClock) -> None:
    world = make_world(script=a_site)
    started = [await start_crawl(world, f"site-{number}.example") for number in range(10)]

    async with world.working():
        rows = [await wait_for_end(world, crawl) for crawl in started]
        items = [await items_of(world, row) for row in rows]

    assert {row.status for row in rows} == {CrawlStatus.COMPLETED}
    assert items == [EXPECTED] * 10
    assert all(
        count <= 2 for url, count in world.gateway.calls.items() if not url.endswith("robots.txt")
    )


async def test_a_small_crawl_does_not_wait_for_the_large_crawls_of_another_caller(
    autojump_clock: MockClock,
) -> None:
    def endless(request: ScrapeRequest, attempt: int) -> Outcome:
        name = request.url.rpartition("/")[2]
        return a_page(f"<a href='/{name}0'>".encode() if name.isdigit() else b"")

    world = make_world(script=endless, think_s=1.0)
    neighbour = CallerId("a caller with many crawls")
    for number in range(24):
        await start_crawl(world, f"site-{number}.example", caller=neighbour)

    async with world.working():
        await trio.sleep(60)
        small = await start_crawl(world, pages_max=2)
        began_at = trio.current_time()
        await wait_for_end(world, small)

    assert trio.current_time() - began_at < 15


async def test_a_crawl_continues_in_a_worker_that_is_started_again(
    autojump_clock: MockClock,
) -> None:
    world = make_world(script=a_site)
    crawl = await start_crawl(world)
    for _ in range(5):
        async with world.working():
            await trio.sleep(1.7)
        await trio.sleep(40)

    async with world.working():
        row = await wait_for_end(world, crawl)

    assert await items_of(world, row) == EXPECTED
    assert row.items == len(EXPECTED)


@pytest.mark.parametrize("error", [Unavailable("the engine is gone"), RuntimeError("a bug")])
async def test_an_outage_or_a_crash_delays_a_crawl_and_changes_nothing(
    autojump_clock: MockClock, error: Exception
) -> None:
    world = make_world(script=a_site)
    crawl = await start_crawl(world)
    calls = 0

    def fails(*_: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls in {3, 9, 27}

    broken = replace(world, env=_failing(world, error, fails))
    async with broken.working():
        row = await wait_for_end(world, crawl)

    assert await items_of(world, row) == EXPECTED


async def test_a_crawl_that_always_crashes_its_crawler_fails(autojump_clock: MockClock) -> None:
    world = make_world(script=a_site)
    crawl = await start_crawl(world)

    broken = replace(world, env=_failing(world, RuntimeError("a bug"), lambda *_: True))
    async with broken.working():
        row = await wait_for_end(world, crawl)

    assert (row.status, row.error_code) == (CrawlStatus.FAILED, "internal_error")


def _failing(world: World, error: Exception, fails: Callable[..., bool]) -> Any:
    """Reading links fails in the calls for which `fails` returns true."""

    class Executor:
        async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
            await trio.lowlevel.checkpoint()
            if "_read_bodies" in repr(work) and fails():
                raise error
            return work(*arguments)

    return replace(world.env, executor=Executor())
