"""What the lists of the dashboard contain, and in which order."""

from __future__ import annotations

import re

import pytest

from conveyor.domain import event_log
from conveyor.domain.changes import Change
from conveyor.domain.crawl_record import CrawlEnd
from conveyor.domain.ids import EventId
from conveyor.domain.model import EventType
from conveyor.ui.words import CRAWL_ENDS
from tests.api.world import World
from tests.ui.test_pages import a_run_with_a_success_and_a_failure, an_ended_run, base_of
from tests.ui.world import Browser, make_ui_world


async def test_a_scheduled_job_is_listed_for_an_operator_before_its_first_run() -> None:
    world = make_ui_world()
    anna = Browser(world)
    await anna.sign_in()
    await anna.open("/ui/jobs/new")
    fields = {"urls": "https://example.com/1", "name": "nightly", "cron": "0 4 * * *"}
    await anna.send("/ui/jobs/new", {**fields, "do": "submit"})
    operator = Browser(world)
    await operator.sign_in("an-operators-key")

    listed = await operator.open("/ui/jobs")
    scheduled = await operator.open("/ui/jobs?show=scheduled")
    failed = await operator.open("/ui/jobs?show=failed")

    assert "nightly" in listed.words
    assert "nightly" in scheduled.words
    assert "nightly" not in failed.words


async def test_a_crawl_is_listed_with_its_name_and_limits(world: World, anna: Browser) -> None:
    fields = {"url": "https://shop.example/start", "max_items": 7, "max_pages": 9}
    crawl_id = (await world.post("/v1/crawls", fields)).json["crawl_id"]

    listed = await anna.open("/ui/jobs?q=shop.example")
    link = re.search(rf'"(/ui/jobs/{crawl_id}/runs/[^"]+)"', listed.text)
    assert link is not None
    run = await anna.open(link[1])

    assert "https://shop.example/start" in listed.words
    assert re.search(r"Crawl from\s+https://shop.example/start\s+running", run.words)
    assert "0 of at most 7 pages kept · 0 of at most 9 fetched" in run.words


@pytest.mark.parametrize("reason", CrawlEnd)
def test_every_end_of_a_crawl_has_a_text(reason: CrawlEnd) -> None:
    assert CRAWL_ENDS[reason].endswith(".")


async def test_the_timeline_of_a_late_run_is_shown_from_a_long_log(
    world: World, anna: Browser
) -> None:
    earlier = await a_run_with_a_success_and_a_failure(world)
    run = await world.run(earlier["job_id"], earlier["latest_run"]["run_id"])
    for _ in range(130):
        world.clock.advance(60)
        pauses = [
            event_log.of_run(
                run, EventType.RUN_PAUSED, now=world.env.now(), identity=EventId(world.env.new_id())
            )
            for _ in range(40)
        ]
        await world.env.commit_with_events(Change(tuple(pauses)))
    late = await an_ended_run(world)

    page = await anna.open(f"{base_of(late)}/timeline")

    for kind in (EventType.RUN_CREATED, EventType.RUN_COMPLETED):
        assert kind in page.words


async def test_the_tasks_of_a_small_run_are_shown_in_list_order(
    world: World, anna: Browser
) -> None:
    submitted = await world.submit(12)
    path = f"{base_of(submitted)}/tasks"

    page = await anna.open(path)
    by_id = await anna.open(f"{path}?order=id")

    places, places_by_id = (
        [int(place) for place in re.findall(r'<tr><td class="num">(\d+)</td>', answer.text)]
        for answer in (page, by_id)
    )
    assert places == list(range(1, 13))
    assert sorted(places_by_id) == places != places_by_id
    assert '<option value="list" selected>' in page.text


async def test_a_failed_task_is_listed_with_what_the_site_answered(
    world: World, anna: Browser
) -> None:
    submitted = await a_run_with_a_success_and_a_failure(world)

    run = await anna.open(base_of(submitted))
    tasks = await anna.open(f"{base_of(submitted)}/tasks?status=failed")

    for page in (run, tasks):
        assert re.search(r"404 from there\.\s+target_not_found", page.words)


async def test_an_empty_list_of_jobs_links_to_the_form_for_a_first_job(anna: Browser) -> None:
    empty = await anna.open("/ui/jobs")
    filtered = await anna.open("/ui/jobs?show=live")

    assert re.search(r"There is no job yet\.\s+Submit a job", empty.words)
    assert "No job matches" in filtered.words
