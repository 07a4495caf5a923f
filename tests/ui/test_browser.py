"""The dashboard in a real browser, with real servers of the embedded engine and of the AWS
engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.demo_server import DemoServer

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, Request, expect

from tests.ui.chromium import AXE, find_chromium, violations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed"),
]
WAIT_MS = 60_000


@pytest.fixture
def context(browser: Browser, demo: DemoServer, request: Any) -> Iterator[BrowserContext]:
    options = getattr(request, "param", {})
    context = browser.new_context(base_url=demo.url, **options)
    context.set_default_timeout(WAIT_MS)
    yield context
    context.close()


def a_page(context: BrowserContext, demo: DemoServer) -> tuple[Page, list[str]]:
    """A page, and its requests to other sites. The browser refuses requests of a preview to the
    site of its author; `leaks` contains those that arrive."""
    page = context.new_page()
    elsewhere: list[str] = []

    def record(request: Request) -> None:
        if not request.url.startswith((f"{demo.url}/", f"{demo.elsewhere}/")):
            elsewhere.append(request.url)

    page.on("request", record)
    return page, elsewhere


def dialogs_of(page: Page) -> list[str]:
    """Collects the dialogs that scripts on the page open."""
    dialogs: list[str] = []

    def record(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", record)
    return dialogs


def test_every_page_is_accessible_and_sends_no_request_to_other_sites(
    context: BrowserContext, demo: DemoServer
) -> None:
    page, elsewhere = a_page(context, demo)
    # The page of a task contains a hostile page, so the browser reports what it has blocked.
    task_page, elsewhere_of_task = a_page(context, demo)
    errors: list[str] = []
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    found: list[str] = []

    for name, path in demo.paths.items():
        visited = task_page if name == "task" else page
        response = visited.goto(path)
        assert response is not None
        assert response.status == 200, name
        if AXE.exists():
            found += [f"{name}: {line}" for line in violations(visited)]

    assert found == []
    assert elsewhere == elsewhere_of_task == demo.leaks == []
    assert errors == []


def test_an_open_page_shows_the_progress_of_its_run(
    context: BrowserContext, demo: DemoServer
) -> None:
    page, _ = a_page(context, demo)
    page.goto(demo.paths["run-paused"])
    expect(page.locator("#connection")).to_have_text("live", timeout=WAIT_MS)
    job_id = demo.paths["run-paused"].split("/")[3]

    demo.call("POST", f"/v1/jobs/{job_id}/resume")
    expect(page.get_by_text("Resume the run to continue.")).to_be_hidden(timeout=WAIT_MS)
    demo.call("POST", f"/v1/jobs/{job_id}/pause")
    expect(page.get_by_text("Resume the run to continue.")).to_be_visible(timeout=WAIT_MS)

    assert page.get_by_role("button", name="Resume").first.is_visible()


def test_a_lost_connection_is_shown_and_reconnected(
    context: BrowserContext, demo: DemoServer
) -> None:
    page, _ = a_page(context, demo)
    page.goto(demo.paths["overview"])
    expect(page.locator("#connection")).to_have_text("live", timeout=WAIT_MS)

    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    expect(page.locator("#connection")).to_have_text("paused", timeout=WAIT_MS)
    demo.submit("made while hidden", ["item/1"])
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    expect(page.locator("#connection")).to_have_text("live", timeout=WAIT_MS)

    expect(page.get_by_text("made while hidden").first).to_be_visible(timeout=WAIT_MS)


@pytest.mark.parametrize("context", [{"java_script_enabled": False}], indirect=True)
def test_a_job_can_be_submitted_and_run_without_scripts(
    context: BrowserContext, demo: DemoServer
) -> None:
    page, _ = a_page(context, demo)
    page.goto("/ui/jobs/new")
    page.get_by_label("URLs, one a line").fill(f"{demo.site}/slow/1\nnot a url")
    page.get_by_label("Name", exact=True).fill("by hand")

    page.get_by_role("button", name="Check and estimate").click()
    assert page.get_by_text("1 valid lines, 1 invalid.").is_visible()
    page.get_by_label("URLs, one a line").fill(f"{demo.site}/slow/1\n{demo.site}/slow/2")
    page.get_by_role("button", name="Submit").click()
    assert page.get_by_text("The job was submitted.").is_visible()
    page.get_by_role("button", name="Pause").click()
    assert page.get_by_text("Paused", exact=True).is_visible()
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_role("button", name="Stop").click()
    assert page.get_by_role("heading", name="The run is stopped").is_visible()
    page.get_by_role("link", name="To the run").click()
    page.get_by_role("link", name="Delete run").click()
    page.get_by_role("button", name="Delete").click()

    assert page.get_by_role("heading", name="by hand").is_visible()


def test_a_hostile_page_in_the_preview_runs_no_script(
    context: BrowserContext, demo: DemoServer
) -> None:
    page, elsewhere = a_page(context, demo)
    dialogs = dialogs_of(page)

    page.goto(demo.paths["task"])
    page.locator("iframe").scroll_into_view_if_needed()
    preview = page.frame_locator("iframe").get_by_role("heading", name="Garden chair")
    preview.wait_for()
    page.goto(f"{demo.paths['task']}/preview")
    page.get_by_role("heading", name="Garden chair").wait_for()

    assert "taken over" not in page.title()
    assert page.url.endswith("/preview")
    assert (elsewhere, dialogs, demo.leaks) == ([], [], [])


def test_a_hostile_name_in_a_live_update_runs_no_script(
    context: BrowserContext, demo: DemoServer
) -> None:
    page, elsewhere = a_page(context, demo)
    dialogs = dialogs_of(page)
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"

    page.goto("/ui/")
    expect(page.locator("#connection")).to_have_text("live", timeout=WAIT_MS)
    submitted = demo.submit(hostile, ["slow/1"], max_attempts=1)
    expect(page.get_by_text("alert(1)").first).to_be_visible(timeout=WAIT_MS)
    on_overview = page.locator("main img, main script").count()
    page.goto(f"/ui/jobs/{submitted['job_id']}/runs/{submitted['latest_run']['run_id']}")
    demo.call("POST", f"/v1/jobs/{submitted['job_id']}/pause")
    expect(page.get_by_text("Resume the run to continue.")).to_be_visible(timeout=WAIT_MS)

    assert (on_overview, page.locator("main img, main script").count()) == (0, 0)
    assert (elsewhere, dialogs, demo.leaks) == ([], [], [])


def test_the_keyboard_reaches_the_content_first(context: BrowserContext, demo: DemoServer) -> None:
    page, _ = a_page(context, demo)
    page.goto("/ui/")

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    assert page.evaluate("document.activeElement.id") == "main"
