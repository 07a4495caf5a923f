"""The page of the API description in a real browser with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.demo_server import DemoServer, a_demo_server

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.ui.chromium import AXE, find_chromium, violations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed"),
]
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with a_demo_server(tmp_path_factory.mktemp("docs") / "data") as demo:
        yield demo


@pytest.fixture
def page(browser: Browser, demo: DemoServer, request: Any) -> Iterator[Page]:
    context: BrowserContext = browser.new_context(
        base_url=demo.url, **getattr(request, "param", {})
    )
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


def open_operation(page: Page, name: str) -> None:
    page.goto(f"/docs#{name}")
    expect(page.locator(f"#{name} form")).to_be_visible(timeout=WAIT_MS)


@pytest.mark.parametrize(
    "page",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark", "viewport": {"width": 380, "height": 800}},
    ],
    indirect=True,
    ids=["light", "dark and narrow"],
)
def test_the_page_is_accessible_and_sends_no_request_to_other_sites(
    page: Page, demo: DemoServer
) -> None:
    elsewhere: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)

    open_operation(page, "submitJob")

    assert [url for url in elsewhere if not url.startswith(f"{demo.url}/")] == []
    assert errors == []
    if AXE.exists():
        assert violations(page) == []


def test_the_page_sends_the_example_of_an_operation_and_shows_the_response(page: Page) -> None:
    open_operation(page, "submitJob")
    page.get_by_label("API key for requests from this page").fill("docs-key")

    form = page.locator("#submitJob form")
    form.get_by_role("button", name="Send").click()

    expect(form.get_by_role("status")).to_contain_text("201", timeout=WAIT_MS)
    expect(form.get_by_role("status")).to_contain_text('"accepted_tasks": 2')


def test_the_page_shows_why_a_request_was_refused(page: Page) -> None:
    open_operation(page, "getJob")

    form = page.locator("#getJob form")
    form.get_by_label("job_id (path, required)").fill("none")
    form.get_by_role("button", name="Send").click()

    expect(form.get_by_role("status")).to_contain_text('"code": "unauthenticated"', timeout=WAIT_MS)


def test_a_request_is_sent_with_the_keyboard_alone(page: Page) -> None:
    page.goto("/docs")

    page.locator("#getHealth > summary").focus()
    page.keyboard.press("Enter")
    button = page.locator("#getHealth").get_by_role("button", name="Send")
    expect(button).to_be_visible(timeout=WAIT_MS)
    button.focus()
    page.keyboard.press("Enter")

    expect(page.locator("#getHealth").get_by_role("status")).to_contain_text(
        '"status": "ok"', timeout=WAIT_MS
    )


@pytest.mark.parametrize("page", [{"java_script_enabled": False}], indirect=True)
def test_the_page_can_be_read_without_scripts(page: Page) -> None:
    page.goto("/docs")

    page.locator("#listRunResults > summary").click()

    assert page.locator("#listRunResults").get_by_role("table").is_visible()
    assert page.locator("#credentials").is_hidden()
    page.locator("#listRunResults").get_by_role("link", name="ListResultsResponse").click()
    assert page.url.endswith("#schema-ListResultsResponse")
