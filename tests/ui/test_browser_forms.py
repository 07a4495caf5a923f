"""Every form of the dashboard, filled in and sent in a real browser to a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ui.demo_server import DemoServer

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.ui.chromium import find_chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed"),
]
WAIT_MS = 60_000
# On the AWS engine only the main forms are tested: all forms call the same operations.
EMBEDDED_ONLY = pytest.mark.parametrize("demo", ["embedded"], indirect=True)


@pytest.fixture
def page(browser: Browser, demo: DemoServer) -> Iterator[Page]:
    context: BrowserContext = browser.new_context(base_url=demo.url, accept_downloads=True)
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


def run_of(demo: DemoServer, name: str, pages: list[str], **fields: Any) -> str:
    """Submits a list, and returns the path of its run."""
    submitted = demo.submit(name, pages, **fields)
    return f"/ui/jobs/{submitted['job_id']}/runs/{submitted['latest_run']['run_id']}"


def ended_run(demo: DemoServer, name: str, pages: list[str], **fields: Any) -> str:
    path = run_of(demo, name, pages, **fields)
    demo.wait_for_end({"job_id": path.split("/")[3]})
    return path


def job_of(path: str) -> str:
    return path.partition("/runs/")[0]


def click(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).first.click()


def expect_words(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.get_by_text(text).first).to_be_visible(timeout=WAIT_MS)


def hold_updates(page: Page) -> list[Route]:
    updates: list[Route] = []

    def hold(route: Route) -> None:
        updates.append(route)

    page.route("**/ui/live?**", hold)
    return updates


def release(page: Page, updates: list[Route]) -> None:
    while not updates:
        page.wait_for_timeout(20)
    for update in updates:
        update.continue_()


def test_failed_tasks_are_rerun_by_reason_and_by_host(page: Page, demo: DemoServer) -> None:
    path = ended_run(demo, "reruns", ["item/1", "missing/1", "blocked/1"], max_attempts=1)

    page.goto(path)
    row = page.get_by_role("row").filter(has_text="bad_target")
    row.get_by_role("button", name="Rerun these").click()
    expect_words(page, "A new run has started.")
    expect_words(page, "run #2 of job")
    # The page follows the run to its end, and its buttons appear by themselves.
    hosts = page.get_by_role("link", name="All hosts, their figures and limits")
    rerun_all = page.get_by_role("button", name="Rerun failed (2)")
    expect(rerun_all).to_be_visible(timeout=WAIT_MS)
    hosts.click()
    click(page, "Rerun failed")

    expect_words(page, "run #3 of job")
    expect(rerun_all).to_be_visible(timeout=WAIT_MS)


@EMBEDDED_ONLY
def test_a_job_is_rerun_from_its_page_and_from_its_run(page: Page, demo: DemoServer) -> None:
    page.goto(job_of(ended_run(demo, "again", ["item/1"])))

    click(page, "Run again")
    expect_words(page, "run #2 of job")
    rerun_all = page.get_by_role("button", name="Rerun all")
    expect(rerun_all).to_be_visible(timeout=WAIT_MS)
    rerun_all.click()

    expect_words(page, "run #3 of job")


def test_the_results_of_a_run_are_exported_and_audited(
    page: Page, demo: DemoServer, tmp_path: Path
) -> None:
    page.goto(ended_run(demo, "exports", ["item/1", "item/2", "missing/1"], max_attempts=1))

    page.get_by_label("Format").select_option("jsonl")
    click(page, "Export")
    link = page.get_by_role("link", name=re.compile(r"^Download .*jsonl"))
    expect(link).to_be_visible(timeout=WAIT_MS)
    with page.expect_download() as download:
        link.click()
    download.value.save_as(tmp_path / "results.jsonl")
    click(page, "Audit")

    assert (tmp_path / "results.jsonl").read_text().count('"task_id":') == 3
    expect_words(page, "The rows match the counters.")


@EMBEDDED_ONLY
def test_an_update_of_the_page_keeps_the_choices_of_a_visitor(page: Page, demo: DemoServer) -> None:
    path = ended_run(demo, "chosen", ["item/1"])
    updates = hold_updates(page)

    page.goto(path)
    form = page.get_by_label("Format")
    form.select_option("jsonl")
    form.evaluate("control => { control.blur(); control.id = 'shown-before'; }")
    page.wait_for_function("document.getElementById('shown-before')")
    release(page, updates)
    # The update replaces the form with the choice in it.
    expect(page.locator("#shown-before")).to_have_count(0, timeout=WAIT_MS)

    expect(page.get_by_label("Format")).to_have_value("jsonl")


@EMBEDDED_ONLY
def test_an_update_waits_until_the_visitor_leaves_the_control(page: Page, demo: DemoServer) -> None:
    path = ended_run(demo, "in use", ["item/1"])
    updates = hold_updates(page)

    page.goto(path)
    form = page.get_by_label("Format")
    form.focus()
    form.evaluate("control => { control.id = 'in-use'; }")
    release(page, updates)
    expect(page.locator("#connection")).to_have_text("live", timeout=WAIT_MS)
    # The first update comes when the page says so, or soon after.
    page.wait_for_timeout(1_000)
    assert page.locator("#in-use").count() == 1
    page.locator("#in-use").evaluate("control => control.blur()")

    expect(page.locator("#in-use")).to_have_count(0, timeout=WAIT_MS)


@EMBEDDED_ONLY
def test_a_budget_and_limits_of_hosts_are_changed_and_removed(page: Page, demo: DemoServer) -> None:
    path = ended_run(demo, "limits", ["item/1"])

    page.goto(job_of(path))
    budget, limits = page.locator('form[action$="/budget"]'), page.locator('form[action$="limits"]')
    budget.get_by_label("Credits").fill("many")
    budget.get_by_role("button").click()
    expect_words(page, "Status 400")
    page.go_back()
    budget.get_by_label("Credits").fill("2500")
    budget.get_by_role("button").click()
    expect_words(page, "2,500 credits a run.")
    limits.get_by_label("at once").fill("4")
    limits.get_by_label("a second").fill("2.5")
    limits.get_by_role("button").click()
    expect_words(page, "4 at once, 2.5 a second")
    page.goto(f"{path}/hosts")
    page.get_by_label("at once").fill("3")
    click(page, "Set")
    expect_words(page, "The host limits were changed.")
    expect(page.get_by_label("at once")).to_have_value("3")
    page.goto(job_of(path))
    limits.get_by_role("button").click()

    expect_words(page, "No limit.")


def test_a_run_is_stopped_with_a_receipt_and_deleted(page: Page, demo: DemoServer) -> None:
    path = run_of(demo, "stopped by hand", [f"slow/{n}" for n in range(3)])

    page.goto(path)
    click(page, "Stop")
    expect_words(page, "yes: no process has an open fetch of this run")
    page.get_by_role("link", name="To the run").click()
    expect_words(page, "3 never fetched")
    page.get_by_role("link", name="Delete run").click()
    page.get_by_role("link", name="Keep it").click()
    page.get_by_role("link", name="Delete job").click()
    click(page, "Delete")

    expect(page).to_have_url(re.compile(r"/ui/jobs$"))
    response = page.goto(path)
    assert response is not None
    assert response.status == 404


@EMBEDDED_ONLY
def test_an_open_job_is_closed(page: Page, demo: DemoServer) -> None:
    path = run_of(demo, "open", ["item/1"], status="open")

    page.goto(job_of(path))
    click(page, "Close: no more tasks")

    expect_words(page, "The job takes no more tasks.")


def test_a_list_is_pasted_uploaded_checked_and_submitted(
    page: Page, demo: DemoServer, tmp_path: Path
) -> None:
    lines = tmp_path / "list.txt"
    lines.write_text(f"{demo.site}/item/1\nno url\n{demo.site}/item/2\n")

    page.goto("/ui/jobs/new")
    page.get_by_label("URLs, one a line").fill(f"{demo.site}/item/0")
    page.get_by_label("or a text file").set_input_files(lines)
    page.get_by_label("Name", exact=True).fill("by hand")
    page.get_by_label("In flight at most").fill("7")
    click(page, "Submit")
    expect_words(page, "line 3:")
    page.get_by_label("Accept invalid lines").check()
    click(page, "Check and estimate")
    expect_words(page, "3 valid lines, 1 invalid.")
    expect_words(page, re.compile(r"Estimated cost: .* credits"))
    click(page, "Submit")

    expect_words(page, "The job was submitted.")
    expect_words(page, "4 of 4")
    expect_words(page, "1 failed")
    page.goto(job_of(page.url))
    expect(page.get_by_text("7", exact=True)).to_be_visible()


def test_a_schedule_is_created_paused_resumed_and_fired_by_hand(
    page: Page, demo: DemoServer
) -> None:
    page.goto("/ui/jobs/new")
    page.get_by_label("URLs, one a line").fill(f"{demo.site}/item/1")
    page.get_by_label("Name", exact=True).fill("nightly")
    page.get_by_text("Parameters, webhook, schedule").click()
    page.get_by_label("Schedule (cron)").fill("0 4 * * *")
    page.get_by_label("Time zone").fill("Europe/Berlin")
    click(page, "Submit")
    expect_words(page, "The schedule was created.")

    page.goto("/ui/schedules")
    row = page.get_by_role("row").filter(has_text="nightly").first
    assert row.locator("td").nth(3).locator("time").count() == 5
    row.get_by_role("button", name="Pause").click()
    expect_words(page, "The schedule is paused.")
    row.get_by_role("button", name="Resume").click()
    expect_words(page, "The schedule is active.")
    row.get_by_role("button", name="Run now").click()

    expect_words(page, "A new run has started.")
    expect_words(page, "1 of 1")


def test_a_webhook_is_tested_set_redelivered_and_removed(page: Page, demo: DemoServer) -> None:
    path = ended_run(demo, "hooked", ["item/1"])
    receiver = f"{demo.site}/hook"

    page.goto("/ui/webhooks")
    page.locator('form[action="/ui/webhooks/test"]').get_by_label("URL").fill(receiver)
    click(page, "Send a test event")
    expect_words(page, re.compile("not delivered in .* answered 500"))
    page.get_by_label("Another job, by its id").fill(job_of(path).rpartition("/")[2])
    click(page, "Show deliveries")
    page.locator('form[action$="/webhook"]').get_by_label("URL").fill(receiver)
    click(page, "Set")
    expect_words(page, "The webhook was set.")
    demo.call("POST", f"{job_of(path).replace('/ui/', '/v1/')}/rerun")
    # The deliveries on the open page appear by themselves.
    click(page, "Redeliver")
    expect_words(page, "The event will be delivered again.")
    expect_words(page, "answered 500")
    click(page, "Remove")

    expect_words(page, "The job has no webhook.")


@EMBEDDED_ONLY
def test_signing_keys_are_created_rotated_and_cancelled(page: Page) -> None:
    page.goto("/ui/webhooks")
    click(page, "Make a key")
    expect_words(page, "The secret is shown this once")
    secret = page.locator("code.secret").inner_text()
    page.goto("/ui/webhooks")
    assert secret not in page.content()
    for choice, words in (
        ("Drop the candidate", "The candidate was dropped."),
        ("Make the candidate active", "The new key signs from now on."),
    ):
        if page.get_by_role("button", name="Rotate").count():
            click(page, "Rotate")
            page.goto("/ui/webhooks")
        click(page, choice)
        expect_words(page, words)


@EMBEDDED_ONLY
def test_tasks_are_filtered_and_their_bodies_downloaded(page: Page, demo: DemoServer) -> None:
    page.goto(demo.paths["tasks"])
    page.get_by_label("Status").select_option("successful")
    page.get_by_label("URL contains").fill("item/15")
    page.get_by_label("Order").select_option("list")
    click(page, "Filter")
    page.get_by_role("link", name=re.compile("item.15$")).first.click()
    expect_words(page, "Task 16")
    with page.expect_download() as download:
        page.get_by_role("link", name=re.compile("^Download")).click()

    assert b"Garden chair" in Path(download.value.path()).read_bytes()


@EMBEDDED_ONLY
def test_jobs_are_searched_and_filtered(page: Page, demo: DemoServer) -> None:
    page.goto("/ui/jobs")
    page.get_by_label("Name, id or external id").fill("SHOP-42".lower())
    click(page, "Search")
    expect(page.get_by_role("link", name="prices-de")).to_be_visible()
    expect(page.get_by_role("link", name="leads")).to_have_count(0)
    page.get_by_role("link", name="With failures").click()
    expect(page.get_by_role("link", name="prices-de")).to_be_visible()
    page.get_by_role("link", name="Scheduled").click()

    expect_words(page, "No job matches")
