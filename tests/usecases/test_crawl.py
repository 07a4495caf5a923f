"""Crawls of random sites: a crawl keeps the pages that a search of the link graph finds, whatever
fails, is repeated or is taken over."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from trio.testing import MockClock

from conveyor.domain.changes import Applied, JobKey, RunKey
from conveyor.domain.crawl import frontier
from conveyor.domain.crawl_record import Crawl, CrawlEnd, CrawlRules, CrawlStatus, Discovery
from conveyor.domain.errors import NotFound, make_problem
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL
from conveyor.domain.model import FailureReason, JobStatus, RunStatus, Task, TaskRef
from conveyor.domain.queries import TasksOf
from conveyor.domain.run.settlement import Claimed
from conveyor.domain.submit.scraper_params import allowed_statuses
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import NotScraped, Scraped
from conveyor.usecases import crawl as crawls
from conveyor.usecases.crawl import Advance, CrawlMemory
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import runs, tasks
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Submission
from tests.builders import CALLER
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import World, a_world

ROOT = "http://example.com"
START = f"{ROOT}/0"


@dataclass(slots=True)
class Site:
    """The pages of a site by path; a page is its HTML, or the path that it redirects to."""

    pages: Mapping[str, str]
    redirects: Mapping[str, str] = field(default_factory=dict)
    robots: str | None = None
    fetched: list[str] = field(default_factory=list)

    def answer(self, url: str) -> Scraped | NotScraped:
        self.fetched.append(url)
        path = url.removeprefix(ROOT)
        final = self.redirects.get(path, path)
        text = self.robots if path == "/robots.txt" else self.pages.get(final)
        if text is None:
            problem = make_problem("target_not_found", "There is no such page", 404)
            return NotScraped(reason=FailureReason.BAD_TARGET, problem=problem, retryable=False)
        moved_to = None if final == path else f"{ROOT}{final}"
        return Scraped(status=200, content_type="text/html", body=text.encode(), final_url=moved_to)


class NoSite(Site):
    def answer(self, url: str) -> Scraped | NotScraped:
        problem = make_problem("dns_failed", "No host", 502, "the host name does not exist")
        return NotScraped(reason=FailureReason.BAD_TARGET, problem=problem, retryable=False)


def linked(*numbers: object) -> str:
    return "".join(f"<a href='/{number}'>" for number in numbers)


async def create(world: World, **rules: Any) -> Crawl:
    full: dict[str, Any] = {"max_items": 10_000, "max_pages": 10_000, **rules}
    return await crawls.create(
        world.env,
        CALLER,
        START,
        CrawlRules(**full),
        Submission(is_open=True),
        job_id=world.env.new_id(),
    )


async def current(world: World, crawl: Crawl) -> Crawl:
    row = await crawls.of_job(world.env, crawl.job_id)
    assert row is not None
    return row


async def tasks_of(world: World, crawl: Crawl) -> list[Task]:
    run = await world.env.store.read(RunKey(crawl.job_id, crawl.run_id))
    assert run is not None
    query = TasksOf(
        job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=100_000
    )
    return await world.env.store.find(query)


async def fetch(world: World, crawl: Crawl, task: Task, site: Site) -> None:
    ref = TaskRef(crawl.job_id, crawl.run_id, task.task_id, task.shard)
    (claimed,) = await tasks.claim(world.env, [ref])
    assert isinstance(claimed, Claimed)
    outcome = site.answer(task.url)
    if isinstance(outcome, Scraped):
        result = await tasks.store_body(world.env, ref, claimed, outcome)
        end = tasks.judge_success(world.env, ref, claimed.task, outcome, result)
    else:
        job = await world.env.store.read(JobKey(crawl.job_id))
        assert job is not None
        end = tasks.judge_failure(world.env, job, ref, claimed.task, outcome)  # type: ignore[assignment]
    assert isinstance(await world.env.commit(end.change), Applied)


async def fetch_some(
    world: World, crawl: Crawl, site: Site, random_source: random.Random | None = None
) -> None:
    waiting = [task for task in await tasks_of(world, crawl) if task.status not in TASK_TERMINAL]
    if random_source is not None:
        waiting = random_source.sample(waiting, random_source.randint(0, len(waiting)))
    for task in waiting:
        await fetch(world, crawl, task, site)


async def crawl_to_end(world: World, crawl: Crawl, site: Site) -> Crawl:
    """Alternates steps and fetches until the crawl has ended."""
    memory = CrawlMemory()
    row = await current(world, crawl)
    while row.due_at is not None:
        outcome, _ = await crawls.advance(world.env, row, memory)
        if outcome is Advance.IDLE:
            await fetch_some(world, crawl, site)
        row = await current(world, crawl)
    return row


async def kept_paths(world: World, crawl: Crawl) -> list[str]:
    pages, _, _ = await crawls.load_kept_pages(world.env, crawl, step=0, skip=0, limit=100_000)
    return [task.url.removeprefix(ROOT) for task in pages]


async def check_counts(world: World, crawl: Crawl) -> None:
    """Asserts that the job has ended and that its counters match its rows."""
    run = await world.env.store.read(RunKey(crawl.job_id, crawl.run_id))
    job = await world.env.store.read(JobKey(crawl.job_id))
    assert run is not None
    assert job is not None
    rows = await tasks_of(world, crawl)
    totals = await totals_of(world.env, run)
    assert run.status not in RUN_LIVE
    assert job.status is JobStatus.CLOSED
    assert totals.admitted == run.total == run.planned == len(rows)
    assert len({task.url for task in rows}) == len(rows)


def a_random_site(seed: int, count: int = 60) -> Site:
    numbers = random.Random(seed)
    pages = {
        f"/{number}": linked(*(numbers.randrange(count + 5) for _ in range(numbers.randrange(5))))
        for number in range(count)
    }
    return Site(pages)


def paths_within(site: Site, depth: int | None) -> set[str]:
    """Every path that a breadth-first search finds, including pages that cannot be read."""
    level, paths, distance = {"/0"}, {"/0"}, 0
    while level and (depth is None or distance < depth):
        texts = [site.pages.get(path, "") for path in level]
        links = {part.partition("'")[0] for text in texts for part in text.split("href='")[1:]}
        level = links - paths
        paths |= level
        distance += 1
    return paths


@pytest.mark.parametrize("depth", [None, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
async def test_a_crawl_keeps_the_pages_that_a_search_of_the_link_graph_finds(
    seed: int, depth: int | None
) -> None:
    world, site = a_world(), a_random_site(seed)
    crawl = await crawl_to_end(world, await create(world, depth=depth), site)

    items = await kept_paths(world, crawl)

    assert (crawl.status, crawl.ended_by) == (CrawlStatus.COMPLETED, None)
    assert set(items) == paths_within(site, depth)
    assert len(items) == len(set(items)) == crawl.items
    assert (crawl.waiting, crawl.pages) == (0, crawl.fetched)
    await check_counts(world, crawl)


@pytest.mark.parametrize("when", When)
async def test_a_crawl_whose_process_fails_at_any_call_has_the_same_result(when: When) -> None:
    """The process dies at call n, for every n; another one continues without its memory."""
    site, at, was_reached = a_random_site(3, 12), 1, True
    expected = paths_within(site, None)
    while was_reached:
        world, fault = a_world(), Fault(at, when)
        crawl = await create(world)
        faulty, memory, row = with_fault(world.env, fault), CrawlMemory(), crawl
        while row.due_at is not None:
            try:
                outcome, _ = await crawls.advance(faulty, row, memory)
            except Unavailable:
                outcome, memory = Advance.LOST, CrawlMemory()
            if outcome is Advance.IDLE:
                await fetch_some(world, crawl, site)
            row = await current(world, crawl)
        # The sweeper does this for a process that died between two changes.
        await runs.complete_if_done(world.env, crawl.job_id, crawl.run_id)

        assert set(await kept_paths(world, row)) == expected, at
        assert row.items == len(expected)
        await check_counts(world, row)
        was_reached, at = fault.was_reached, at + 1
    assert at > 50


@pytest.mark.parametrize("seed", range(10))
async def test_concurrent_processes_perform_each_step_of_a_crawl_once(seed: int) -> None:
    world, site, random_source = a_world(), a_random_site(seed), random.Random(seed)
    crawl = await create(world, depth=random_source.choice([None, 3]))
    memories = [CrawlMemory() for _ in range(3)]
    seen = [crawl] * 3  # Each process has the row that it read last.
    while (row := await current(world, crawl)).due_at is not None:
        number = random_source.randrange(3)
        if random_source.random() < 0.5:
            seen[number] = row
        _, advanced = await crawls.advance(world.env, seen[number], memories[number])
        seen[number] = advanced or seen[number]
        if random_source.random() < 0.1:
            memories[number] = CrawlMemory()
        await fetch_some(world, crawl, site, random_source)

    assert set(await kept_paths(world, row)) == paths_within(site, row.rules.depth)
    assert row.items == len(await kept_paths(world, row))
    await check_counts(world, row)


@pytest.mark.parametrize("seed", range(5))
async def test_a_long_log_of_steps_is_read_to_its_end_although_fetches_are_out_of_order(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Pages are fetched in random order, and only a small window of steps is read at a time."""
    monkeypatch.setattr(crawls, "_WINDOW_STEPS", 2)
    monkeypatch.setattr(crawls, "_WINDOWS_MAX", 3)
    world, site, random_source = a_world(), a_random_site(seed, 200), random.Random(seed)
    crawl, memory = await create(world), CrawlMemory()
    row, steps_left = crawl, 2_000
    while row.due_at is not None and steps_left:
        outcome, _ = await crawls.advance(world.env, row, memory)
        if outcome is Advance.IDLE:
            await fetch_some(world, crawl, site, random_source)
        row, steps_left = await current(world, crawl), steps_left - 1

    assert row.due_at is None
    assert set(await kept_paths(world, row)) == paths_within(site, None)


async def test_a_page_with_more_links_than_fit_into_a_step_is_read_in_several_steps() -> None:
    world = a_world()
    pages = {f"/{number}": "" for number in range(2500)}
    site = Site({**pages, "/0": linked(*range(2500))})

    crawl = await crawl_to_end(world, await create(world), site)

    assert crawl.items == 2500
    assert crawl.steps > 25
    assert crawl.duplicates == 0
    assert (await kept_paths(world, crawl))[:3] == ["/0", "/1", "/2"]


async def test_redirects_and_canonical_links_lead_to_one_kept_page() -> None:
    canonical = "<link rel=canonical href='/9'>" + linked("lost")
    site = Site(
        {"/0": linked(1, 2, 3, 4), "/1": "", "/9": linked(1), "/3": canonical, "/4": canonical},
        redirects={"/2": "/1"},
    )
    world = a_world()

    crawl = await crawl_to_end(world, await create(world, depth=1), site)

    assert set(await kept_paths(world, crawl)) == {"/0", "/1", "/9"}
    assert (crawl.pages, crawl.failed) == (6, 0)


async def test_robots_txt_is_fetched_once_and_obeyed(autojump_clock: MockClock) -> None:
    robots = "User-agent: *\nDisallow: /2\nCrawl-delay: 4\nSitemap: /nowhere"
    site = Site({"/0": linked(1, 2), "/1": linked(2), "/2": ""}, robots=robots)
    world = a_world()
    crawl = await create(world)
    crawl = await crawl_to_end(world, crawl, site)
    job = await world.env.store.read(JobKey(crawl.job_id))

    assert set(await kept_paths(world, crawl)) == {"/0", "/1"}
    assert site.fetched.count(f"{ROOT}/robots.txt") == 1
    assert f"{ROOT}/2" not in site.fetched
    assert job is not None
    assert job.host_limits is not None
    assert job.host_limits.limit_for("example.com").rate_per_s == 0.25


@pytest.mark.parametrize("status", [401, 403, 404, 410])
async def test_a_site_without_robots_txt_is_crawled_whatever_error_the_gateway_reports(
    status: int,
) -> None:
    """A remote gateway reports such answers with codes of its own."""

    class Remote(Site):
        def answer(self, url: str) -> Scraped | NotScraped:
            if not url.endswith("/robots.txt"):
                return super().answer(url)
            asked = [task for task in requested if task.url == url]
            if status in allowed_statuses(asked[-1].params or {}):
                return Scraped(status=status, content_type="text/html", body=b"Disallow: /")
            problem = make_problem("RESP001", "The page could not be fetched", 422)
            return NotScraped(reason=FailureReason.BLOCKED, problem=problem, retryable=False)

    world, site = a_world(), Remote({"/0": linked(1), "/1": ""})
    crawl, requested = await create(world), list[Task]()
    await crawls.advance(world.env, await current(world, crawl), CrawlMemory())
    requested += await tasks_of(world, crawl)
    crawl = await crawl_to_end(world, crawl, site)

    assert crawl.status is CrawlStatus.COMPLETED
    assert set(await kept_paths(world, crawl)) == {"/0", "/1"}


async def test_a_start_page_that_is_not_allowed_or_cannot_be_fetched_fails_the_crawl() -> None:
    world = a_world()
    refused = await crawl_to_end(
        world, await create(world), Site({"/0": ""}, robots="User-agent: *\nDisallow: /")
    )
    missing = await crawl_to_end(world, await create(world), Site({}))
    unreachable = await crawl_to_end(world, await create(world), NoSite({}))
    unread = await crawl_to_end(
        world,
        await create(world, obeys_robots=False),
        Site({}, robots="User-agent: *\nDisallow: /"),
    )

    failed = (refused, missing, unreachable, unread)
    assert {crawl.status for crawl in failed} == {CrawlStatus.FAILED}
    assert {crawl.error_code for crawl in failed[:3]} == {frontier.SEED_UNREACHABLE}
    assert refused.error_detail == "robots.txt does not allow the start page."
    assert unreachable.error_detail == "robots.txt cannot be read: the host name does not exist."
    assert [crawl.items for crawl in failed] == [0] * 4


async def test_pages_of_sitemaps_are_crawled() -> None:
    locations = "".join(f"<loc>{ROOT}/{number}</loc>" for number in (1, 2))
    site = Site(
        {
            "/0": linked(8),
            "/index.xml": f"<sitemapindex><loc>{ROOT}/sub.xml</loc></sitemapindex>",
            "/sub.xml": f"<urlset>{locations}</urlset>",
            "/1": linked(9),
            "/2": "",
        },
        robots=f"Sitemap: {ROOT}/index.xml",
    )
    world = a_world()

    only = await crawl_to_end(world, await create(world, discovery=(Discovery.SITEMAP,)), site)
    both = await crawl_to_end(world, await create(world, discovery=tuple(Discovery)), site)

    assert await kept_paths(world, only) == ["/0", "/1", "/2"]
    assert set(await kept_paths(world, both)) == {"/0", "/1", "/2", "/8", "/9"}


@pytest.mark.parametrize(
    ("rules", "ended_by"),
    [
        ({"max_items": 7}, CrawlEnd.MAX_ITEMS),
        ({"max_pages": 9}, CrawlEnd.MAX_PAGES),
        ({"max_seconds": 5}, CrawlEnd.MAX_SECONDS),
    ],
)
async def test_a_limit_ends_the_crawl_and_its_job(
    rules: dict[str, int], ended_by: CrawlEnd
) -> None:
    world, site = a_world(), Site({f"/{n}": linked(n + 1, n + 2) for n in range(500)})
    crawl, memory = await create(world, **rules), CrawlMemory()
    row = crawl
    while row.due_at is not None:
        outcome, _ = await crawls.advance(world.env, row, memory)
        if outcome is Advance.IDLE:
            await fetch_some(world, crawl, site)
            world.clock.advance(1.0)
        row = await current(world, crawl)
    run = await world.env.store.read(RunKey(crawl.job_id, crawl.run_id))

    assert (row.status, row.ended_by) == (CrawlStatus.COMPLETED, ended_by)
    assert row.items <= rules.get("max_items", 500)
    assert row.pages <= rules.get("max_pages", 500)
    assert run is not None
    assert run.status not in RUN_LIVE


async def test_a_stop_ends_crawl_and_job_and_can_be_repeated() -> None:
    world = a_world()
    crawl = await create(world)
    await crawls.advance(world.env, crawl, CrawlMemory())

    first = await crawls.stop(world.env, CALLER, crawl.job_id)
    again = await crawls.stop(world.env, CALLER, crawl.job_id)
    run = await world.env.store.read(RunKey(crawl.job_id, crawl.run_id))

    assert (first.status, first.ended_by) == (CrawlStatus.STOPPED, CrawlEnd.USER)
    assert again.finished_at == first.finished_at
    assert run is not None
    assert run.status is RunStatus.STOPPED


async def test_stopping_or_deleting_the_job_ends_the_crawl() -> None:
    world = a_world()
    stopped, deleted = await create(world), await create(world)
    for crawl in (stopped, deleted):
        await crawls.advance(world.env, crawl, CrawlMemory())
    await runs.stop(world.env, CALLER, stopped.job_id)
    await jobs.delete(world.env, CALLER, deleted.job_id)
    for crawl in (stopped, deleted):
        await crawls.advance(world.env, await current(world, crawl), CrawlMemory())

    assert (await current(world, stopped)).status is CrawlStatus.STOPPED
    assert await crawls.due(world.env, limit=10) == []
    with pytest.raises(NotFound):
        await crawls.own(world.env, CALLER, deleted.job_id)


async def test_a_repeated_request_returns_the_same_crawl() -> None:
    world = a_world()
    crawl = await create(world)

    again = await crawls.create(
        world.env, CALLER, START, CrawlRules(), Submission(is_open=True), job_id=crawl.job_id
    )

    assert again == crawl


async def test_a_crawl_that_cannot_be_advanced_is_given_up() -> None:
    world = a_world()
    crawl = await create(world)

    await crawls.give_up(world.env, crawl)
    row = await current(world, crawl)

    assert (row.status, row.error_code) == (CrawlStatus.FAILED, frontier.INTERNAL_ERROR)
