"""`python -m tests.ui.screenshots`: writes the screenshots of docs/dashboard.md.

They show real runs with a gateway that invents sites. A chart needs minutes to fill, so the live
run continues for --minutes before the pages are visited."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, FloatRect, Page

from tests.ui.chromium import AXE, ROOT, a_chromium, violations
from tests.ui.demo_server import DemoServer, a_demo_server
from tests.ui.gateway import a_gateway
from tests.ui.waits import boxes_of_all_reasons

# For the gateway this is an account without credits.
BROKE = "broke-account"
IMAGES = ROOT / "docs" / "images" / "dashboard"
HEIGHT_MAX = 1_700
STYLES: dict[str, Any] = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def pages_of(host: str, word: str, count: int) -> list[str]:
    return [f"https://{host}/{word}/{number}" for number in range(1, count + 1)]


def submit(demo: DemoServer, name: str, urls: list[str], *, key: str = "dev", **fields: Any) -> Any:
    body = {"name": name, "tasks": [{"url": url} for url in urls], **fields}
    return demo.call("POST", "/v1/jobs", body, key=key)


def mix(*lists: list[str]) -> list[str]:
    """Interleaves the lists evenly."""
    places = [(place / len(urls), url) for urls in lists for place, url in enumerate(urls, 1)]
    return [url for _, url in sorted(places)]


def start_jobs(demo: DemoServer, receiver: str) -> dict[str, Any]:
    """Submits jobs that reach every state that a page can show."""
    live_urls = mix(
        pages_of("shop.example", "item", 9_000),
        pages_of("news.example", "story", 3_500),
        pages_of("blog.example", "post", 2_500),
        pages_of("slow.example", "report", 900),
        pages_of("gone.example", "item", 90),
    )
    hosts = {"shop.example": {"rate_per_s": 8}, "blog.example": {"rate_per_s": 2}}
    ended_urls = mix(
        pages_of("shop.example", "p", 1_200),
        pages_of("gone.example", "p", 24),
        pages_of("slow.example", "p", 60),
        pages_of("blog.example", "p", 300),
    )
    webhook = {"url": f"{receiver}/hooks/prices", "signature": False}
    slow = {"rate_per_s": 2}
    jobs = {
        "live": submit(
            demo, "catalogue-full", live_urls, host_limits={"hosts": hosts}, max_inflight=60
        ),
        "ended": submit(
            demo,
            "prices-de",
            ended_urls,
            max_attempts=1,
            external_id="shop-42",
            metadata={"team": "pricing", "country": "de"},
            webhook=webhook,
        ),
        "paused": submit(demo, "leads", pages_of("blog.example", "l", 400), host_limits=slow),
        "budget": submit(
            demo, "reviews", pages_of("news.example", "r", 2_000), budget={"credits": 150}
        ),
        "stopped": submit(
            demo,
            "images",
            pages_of("slow.example", "i", 500),
            webhook={"url": f"{receiver}/works", "signature": False},
        ),
        # An account of another caller, without credits.
        "failed": submit(demo, "feed", pages_of("shop.example", "f", 300), key=BROKE),
    }
    submit_schedules(demo)
    return jobs


def submit_schedules(demo: DemoServer) -> None:
    minutely = {"rate": {"every": 1, "unit": "minute"}}
    front, stock = pages_of("news.example", "front", 12), pages_of("slow.example", "stock", 16)
    submit(demo, "news-front", front, type="scheduled", schedule=minutely)
    # Its runs last longer than a minute, so some times are skipped.
    submit(demo, "stock", stock, type="scheduled", schedule=minutely, max_inflight=1)
    monthly = {"cron": "30 6 1,15 * *", "timezone": "Europe/Berlin"}
    submit(demo, "report", front, type="scheduled", schedule=monthly)
    nightly = {"cron": "0 4 * * 1-5", "timezone": "Europe/Berlin"}
    paused = submit(demo, "news-nightly", front, type="scheduled", schedule=nightly)
    path = f"/v1/jobs/{paused['job_id']}/schedule/state"
    demo.call("POST", path, {"schedule_state": "paused"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ui.screenshots", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="how long the live run runs")
    parser.add_argument("--into", type=Path, default=IMAGES, help="the folder of the images")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    count = 0
    with a_scene(options.minutes) as demo, a_chromium() as browser:
        for style in STYLES:
            count += take_pictures(browser, demo, style, options.into)
        take_wait_boxes(browser, options.into)
    print(f"{count} violations of level AA; screenshots in {options.into}")
    return 1 if count else 0


@contextmanager
def a_scene(minutes: float) -> Iterator[DemoServer]:
    with tempfile.TemporaryDirectory() as folder, a_gateway() as gateway:
        more = {"CONVEYOR_GATEWAY_URL": f"{gateway}/v1/", "CONVEYOR_CREDIT_COST": "0.00028"}
        with a_demo_server(Path(folder) / "data", more) as demo:
            began_at = time.monotonic()
            jobs = start_jobs(demo, gateway)
            demo.wait_for_end(jobs["ended"])
            demo.wait_for_end(jobs["failed"], key=BROKE)
            # The same job is run a second time.
            rerun = f"/v1/jobs/{jobs['ended']['job_id']}/rerun?reason=timeout"
            jobs["ended"] = demo.call("POST", rerun)
            demo.wait_for_end(jobs["ended"])
            demo.call("POST", f"/v1/jobs/{jobs['paused']['job_id']}/pause")
            demo.call("POST", f"/v1/jobs/{jobs['stopped']['job_id']}/stop")
            time.sleep(max(0.0, 60.0 * minutes - (time.monotonic() - began_at)))
            demo.paths = paths_of(demo, jobs)
            yield demo


def paths_of(demo: DemoServer, jobs: dict[str, Any]) -> dict[str, str]:
    base = {
        name: f"/ui/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
        for name, job in jobs.items()
        if "latest_run" in job
    }
    job, ended = f"/ui/jobs/{jobs['ended']['job_id']}", base["ended"]
    api = ended.replace("/ui/", "/v1/")
    good = demo.call("GET", f"{api}/results?status=successful&limit=1")["results"][0]["task_id"]
    bad = demo.call("GET", f"{api}/results?status=failed&limit=1")["results"][0]["task_id"]
    return {
        "overview": "/ui/",
        "jobs": "/ui/jobs",
        "job": job,
        "run-live": base["live"],
        "run-ended": ended,
        "run-paused": base["paused"],
        "run-budget": base["budget"],
        "tasks": f"{ended}/tasks?status=failed",
        "hosts": f"{base['live']}/hosts",
        "timeline": f"{ended}/timeline",
        "task": f"{ended}/tasks/{good}",
        "task-failed": f"{ended}/tasks/{bad}",
        "new-job": "/ui/jobs/new",
        "schedules": "/ui/schedules",
        "webhooks": f"/ui/webhooks?job={jobs['ended']['job_id']}",
        "system": "/ui/system",
        "delete": f"{ended}/delete",
        "api": "/docs#submitJob",
    }


def take_pictures(browser: Browser, demo: DemoServer, style: str, into: Path) -> int:
    """Visits every page in one style, and checks it with axe-core."""
    count = 0
    context = browser.new_context(base_url=demo.url, **STYLES[style])
    page = context.new_page()
    for name, path in demo.paths.items():
        page.goto(path)
        if name == "new-job":
            check_a_list(page)
        # This is long enough for the first update of a live page.
        page.wait_for_timeout(1_500)
        page.screenshot(path=into / f"{name}-{style}.png", full_page=True, clip=visible_part(page))
        if AXE.exists():
            for line in violations(page):
                count += 1
                print(f"{name} {style}: {line}")
    context.close()
    return count


def visible_part(page: Page) -> FloatRect:
    """The part of the page that fits into a small picture."""
    width, height = page.evaluate(
        "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
    )
    return {"x": 0, "y": 0, "width": width, "height": min(height, HEIGHT_MAX)}


def check_a_list(page: Page) -> None:
    """Shows the dry run of a list with an invalid line."""
    page.get_by_label("URLs, one a line").fill(
        "https://shop.example/p/1\nhttps://shop.example/p/2\nshop.example/p/3\nhttps://news.example/"
    )
    page.get_by_label("Name", exact=True).fill("prices-fr")
    page.get_by_label("Accept invalid lines").check()
    page.get_by_role("button", name="Check and estimate").click()


def take_wait_boxes(browser: Browser, into: Path) -> None:
    """Pictures of every wait reason with its text and its remedy, taken from pages of runs."""
    for style in ("light", "dark"):
        page = browser.new_page(**STYLES[style])
        page.set_content(boxes_of_all_reasons())
        page.screenshot(path=into / f"waits-{style}.png", full_page=True)
        page.close()


if __name__ == "__main__":
    sys.exit(main())
