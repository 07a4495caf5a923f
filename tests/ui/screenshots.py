"""`python -m tests.ui.screenshots`: writes the screenshots of docs/dashboard.md.

They show real runs, over a gateway that invents sites. A chart needs minutes to fill: the live run
is watched for --minutes before the pages are visited.
"""

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
from tests.ui.gateway import a_gateway
from tests.ui.stage import Stage, a_stage
from tests.ui.waits import boxes_of_all_reasons

# The gateway knows it as an account without credits.
BROKE = "broke-account"
IMAGES = ROOT / "docs" / "images" / "dashboard"
HEIGHT_MAX = 1_700
LOOKS: dict[str, Any] = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def pages_of(host: str, word: str, count: int) -> list[str]:
    return [f"https://{host}/{word}/{number}" for number in range(1, count + 1)]


def submit(stage: Stage, name: str, urls: list[str], *, key: str = "dev", **fields: Any) -> Any:
    body = {"name": name, "tasks": [{"url": url} for url in urls], **fields}
    return stage.call("POST", "/v1/jobs", body, key=key)


def mix(*lists: list[str]) -> list[str]:
    """The lists, dealt out evenly."""
    places = [(place / len(urls), url) for urls in lists for place, url in enumerate(urls, 1)]
    return [url for _, url in sorted(places)]


def start_jobs(stage: Stage, receiver: str) -> dict[str, Any]:
    """Submits jobs that come to every state worth looking at."""
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
            stage, "catalogue-full", live_urls, host_limits={"hosts": hosts}, max_inflight=60
        ),
        "ended": submit(
            stage,
            "prices-de",
            ended_urls,
            max_attempts=1,
            external_id="shop-42",
            metadata={"team": "pricing", "country": "de"},
            webhook=webhook,
        ),
        "paused": submit(stage, "leads", pages_of("blog.example", "l", 400), host_limits=slow),
        "budget": submit(
            stage, "reviews", pages_of("news.example", "r", 2_000), budget={"credits": 150}
        ),
        "stopped": submit(
            stage,
            "images",
            pages_of("slow.example", "i", 500),
            webhook={"url": f"{receiver}/works", "signature": False},
        ),
        # An account without credits, of another caller.
        "failed": submit(stage, "feed", pages_of("shop.example", "f", 300), key=BROKE),
    }
    submit_schedules(stage)
    return jobs


def submit_schedules(stage: Stage) -> None:
    minutely = {"rate": {"every": 1, "unit": "minute"}}
    front, stock = pages_of("news.example", "front", 12), pages_of("slow.example", "stock", 16)
    submit(stage, "news-front", front, type="scheduled", schedule=minutely)
    # Its runs last longer than a minute, so that times are skipped.
    submit(stage, "stock", stock, type="scheduled", schedule=minutely, max_inflight=1)
    monthly = {"cron": "30 6 1,15 * *", "timezone": "Europe/Berlin"}
    submit(stage, "report", front, type="scheduled", schedule=monthly)
    nightly = {"cron": "0 4 * * 1-5", "timezone": "Europe/Berlin"}
    paused = submit(stage, "news-nightly", front, type="scheduled", schedule=nightly)
    path = f"/v1/jobs/{paused['job_id']}/schedule/state"
    stage.call("POST", path, {"schedule_state": "paused"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ui.screenshots", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="how long the live run runs")
    parser.add_argument("--into", type=Path, default=IMAGES, help="the folder of the images")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    count = 0
    with a_scene(options.minutes) as stage, a_chromium() as browser:
        for look in LOOKS:
            count += take_pictures(browser, stage, look, options.into)
        take_wait_boxes(browser, options.into)
    print(f"{count} violations of level AA; screenshots in {options.into}")
    return 1 if count else 0


@contextmanager
def a_scene(minutes: float) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder, a_gateway() as gateway:
        more = {"CONVEYOR_GATEWAY_URL": f"{gateway}/v1/", "CONVEYOR_CREDIT_COST": "0.00028"}
        with a_stage(Path(folder) / "data", more) as stage:
            began_at = time.monotonic()
            jobs = start_jobs(stage, gateway)
            stage.wait_for_end(jobs["ended"])
            stage.wait_for_end(jobs["failed"], key=BROKE)
            # The same job again, for a second run.
            rerun = f"/v1/jobs/{jobs['ended']['job_id']}/rerun?reason=timeout"
            jobs["ended"] = stage.call("POST", rerun)
            stage.wait_for_end(jobs["ended"])
            stage.call("POST", f"/v1/jobs/{jobs['paused']['job_id']}/pause")
            stage.call("POST", f"/v1/jobs/{jobs['stopped']['job_id']}/stop")
            time.sleep(max(0.0, 60.0 * minutes - (time.monotonic() - began_at)))
            stage.paths = paths_of(stage, jobs)
            yield stage


def paths_of(stage: Stage, jobs: dict[str, Any]) -> dict[str, str]:
    base = {
        name: f"/ui/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
        for name, job in jobs.items()
        if "latest_run" in job
    }
    job, ended = f"/ui/jobs/{jobs['ended']['job_id']}", base["ended"]
    api = ended.replace("/ui/", "/v1/")
    good = stage.call("GET", f"{api}/results?status=successful&limit=1")["results"][0]["task_id"]
    bad = stage.call("GET", f"{api}/results?status=failed&limit=1")["results"][0]["task_id"]
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


def take_pictures(browser: Browser, stage: Stage, look: str, into: Path) -> int:
    """Visits every page in one look, and checks it with axe-core on the way."""
    count = 0
    context = browser.new_context(base_url=stage.url, **LOOKS[look])
    page = context.new_page()
    for name, path in stage.paths.items():
        page.goto(path)
        if name == "new-job":
            check_a_list(page)
        # Long enough for the first update of a live page.
        page.wait_for_timeout(1_500)
        page.screenshot(path=into / f"{name}-{look}.png", full_page=True, clip=visible_part(page))
        if AXE.exists():
            for line in violations(page):
                count += 1
                print(f"{name} {look}: {line}")
    context.close()
    return count


def visible_part(page: Page) -> FloatRect:
    """The page down to a height at which a picture is still small."""
    width, height = page.evaluate(
        "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
    )
    return {"x": 0, "y": 0, "width": width, "height": min(height, HEIGHT_MAX)}


def check_a_list(page: Page) -> None:
    """A dry run of a list with a line that is no URL."""
    page.get_by_label("URLs, one a line").fill(
        "https://shop.example/p/1\nhttps://shop.example/p/2\nshop.example/p/3\nhttps://news.example/"
    )
    page.get_by_label("Name", exact=True).fill("prices-fr")
    page.get_by_label("Accept invalid lines").check()
    page.get_by_role("button", name="Check and estimate").click()


def take_wait_boxes(browser: Browser, into: Path) -> None:
    """Every wait reason with its text and its remedy, as pages of runs show them."""
    for look in ("light", "dark"):
        page = browser.new_page(**LOOKS[look])
        page.set_content(boxes_of_all_reasons())
        page.screenshot(path=into / f"waits-{look}.png", full_page=True)
        page.close()


if __name__ == "__main__":
    sys.exit(main())
