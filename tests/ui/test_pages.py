"""Pages show the data of the API to the caller that owns it, and their forms perform its
operations. No scripts run in these tests."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conveyor.domain.model import EventType, FailureReason
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ui.words import EVENTS, FAILURES, REMEDIES, WAITS
from conveyor.usecases.run import reconcile
from tests.api.world import BERT, World
from tests.ui.waits import a_page_that_shows, bring_about
from tests.ui.world import Browser, make_ui_world

PAGE_BYTES_MAX = 30_000
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def base_of(submitted: Any) -> str:
    return f"/ui/jobs/{submitted['job_id']}/runs/{submitted['latest_run']['run_id']}"


async def a_run_with_a_success_and_a_failure(world: World, **fields: Any) -> Any:
    submitted = await world.submit(3, name="prices", **fields)
    rows = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
    await world.succeed(submitted["job_id"], rows[0], b"<h1>Hello</h1>")
    await world.fail(submitted["job_id"], rows[1])
    return submitted


async def an_ended_run(world: World, **fields: Any) -> Any:
    submitted = await a_run_with_a_success_and_a_failure(world, **fields)
    rows = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
    await world.succeed(submitted["job_id"], rows[2])
    return submitted


async def test_the_overview_counts_waiting_and_failed_tasks(world: World, anna: Browser) -> None:
    await a_run_with_a_success_and_a_failure(world)

    page = await anna.open("/ui/")

    assert "prices" in page.words
    assert re.search(r"Waiting\s+1\s+in 1 live run", page.words)
    assert "The page or the host does not exist: 1" in page.words


@pytest.mark.parametrize("text", ["rice", "PRICES", "my-own-id"])
async def test_jobs_are_found_by_name_and_external_id(
    world: World, anna: Browser, text: str
) -> None:
    await world.submit(name="prices", external_id="my-own-id")
    await world.submit(name="another")

    page = await anna.open(f"/ui/jobs?q={text}")

    assert "prices" in page.words
    assert "another" not in page.words


async def test_searching_for_a_job_id_opens_the_job(world: World, anna: Browser) -> None:
    submitted = await world.submit()

    answer = await anna.open(f"/ui/jobs?q={submitted['job_id']}")

    assert answer.location == f"/ui/jobs/{submitted['job_id']}"


@pytest.mark.parametrize(
    ("show", "names"), [("live", {"alive"}), ("failed", {"prices"}), ("", {"alive", "prices"})]
)
async def test_jobs_are_filtered_by_the_state_of_their_run(
    world: World, anna: Browser, show: str, names: set[str]
) -> None:
    await an_ended_run(world)
    await world.submit(name="alive")

    page = await anna.open(f"/ui/jobs?show={show}")

    assert {name for name in ("alive", "prices") if name in page.words} == names


async def test_every_page_of_a_run_is_below_the_size_limit(world: World, anna: Browser) -> None:
    submitted = await an_ended_run(world)
    base = base_of(submitted)
    rows = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])

    for path in (
        "/ui/",
        "/ui/jobs",
        "/ui/jobs/new",
        f"/ui/jobs/{submitted['job_id']}",
        *(f"{base}{tab}" for tab in ("", "/tasks", "/hosts", "/timeline", "/delete")),
        *(f"{base}/tasks/{task.task_id}" for task in rows),
        f"/ui/webhooks?job={submitted['job_id']}",
        "/ui/schedules",
        "/ui/system",
    ):
        page = await anna.open(path)
        assert page.status == 200, (path, page.words)
        assert len(page.text.encode()) < PAGE_BYTES_MAX, path


async def a_long_run(world: World) -> Any:
    """A run that has ended a task in each of several minutes, with failures."""
    submitted = await world.submit(80, name="n" * 100)
    job_id = submitted["job_id"]
    for number, task in enumerate(await world.tasks_of(job_id, submitted["latest_run"]["run_id"])):
        await (world.succeed if number % 3 else world.fail)(job_id, task)
        world.clock.advance(60)
        await reconcile.sweep_runs(world.env)
        if number == 70:
            break
    return submitted


async def test_pages_with_charts_and_many_jobs_are_below_the_size_limit(
    world: World, anna: Browser
) -> None:
    for number in range(30):
        await world.submit(name=f"{number} " + "n" * 90)
    base = base_of(await a_long_run(world))

    for path in ("/ui/", "/ui/jobs", base):
        page = await anna.open(path)
        assert page.status == 200
        assert len(page.text.encode()) < PAGE_BYTES_MAX, path


async def test_a_chart_also_has_its_figures_as_a_table(world: World, anna: Browser) -> None:
    base = base_of(await a_long_run(world))

    for path in ("/ui/", base):
        page = await anna.open(path)
        assert re.search(r'role="img" aria-label="Pages a minute[^"]*: 47 ok, 24 failed', page.text)
        assert "Figures" in page.words
        assert re.search(r'<path class="ok" d="(M[\dVhz -]+)+"/>', page.text)
        assert re.search(r"<script(?! src=)|<style|\sstyle=|\son\w+=", page.text) is None


async def test_the_failures_of_a_host_can_be_rerun_from_the_run(
    world: World, anna: Browser
) -> None:
    base = base_of(await an_ended_run(world))

    page = await anna.open(base)

    assert "Where pages failed" in page.words
    assert '<input type="hidden" name="host" value="example.com">' in page.text


async def test_a_run_that_waits_for_its_budget_shows_a_form_to_raise_it(
    world: World, anna: Browser
) -> None:
    submitted = await world.submit(2)
    run = await world.run(submitted["job_id"], submitted["latest_run"]["run_id"])
    await bring_about(world, submitted["job_id"], run.run_id, WaitReason.BUDGET)

    page = await anna.open(base_of(submitted))

    assert "Raise the budget" in page.words


async def test_no_page_holds_an_inline_script_or_style(world: World, anna: Browser) -> None:
    base = base_of(await an_ended_run(world))

    for path in ("/ui/", "/ui/jobs/new", base, f"{base}/hosts", "/ui/system"):
        page = await anna.open(path)
        assert re.search(r"<script(?! src=)|<style|\sstyle=|\son\w+=", page.text) is None
        assert page.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
        assert page.headers["X-Frame-Options"] == "DENY"


async def test_a_run_is_paused_and_resumed(world: World, anna: Browser) -> None:
    submitted = await world.submit()
    await anna.open(base_of(submitted))

    paused = await anna.send(f"/ui/jobs/{submitted['job_id']}/pause")
    shown = await anna.open(paused.location)
    resumed = await anna.send(f"/ui/jobs/{submitted['job_id']}/resume")

    assert "Pages in flight are finished" in shown.words
    assert "Resume the run to continue." in shown.words
    assert "The run continues." in (await anna.open(resumed.location)).words


async def test_a_stop_shows_its_receipt(world: World, anna: Browser) -> None:
    submitted = await world.submit(2)
    await anna.open(base_of(submitted))

    receipt = await anna.send(f"/ui/jobs/{submitted['job_id']}/stop")

    assert receipt.status == 200
    assert "no process has an open fetch of this run" in receipt.words
    assert "stopped" in (await anna.open(base_of(submitted))).words


@pytest.mark.parametrize(
    "chosen",
    [
        {"status": "failed"},
        {"status": "failed", "reason": "bad_target"},
        {"status": "failed", "host": "example.com"},
    ],
)
async def test_failed_tasks_are_rerun_from_the_run(
    world: World, anna: Browser, chosen: dict[str, str]
) -> None:
    submitted = await an_ended_run(world)
    await anna.open(base_of(submitted))

    answer = await anna.send(f"/ui/jobs/{submitted['job_id']}/rerun", chosen)

    run_id = re.findall(r"runs/(\w+)", answer.location)[0]
    assert (await world.run(submitted["job_id"], run_id)).retried == 1


async def test_a_form_that_is_sent_twice_is_performed_once(world: World, anna: Browser) -> None:
    submitted = await an_ended_run(world)
    await anna.open(base_of(submitted))
    fields = {"status": "failed", "once": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}

    first = await anna.send(f"/ui/jobs/{submitted['job_id']}/rerun", fields)
    second = await anna.send(f"/ui/jobs/{submitted['job_id']}/rerun", fields)

    assert (first.status, first.location) == (303, second.location)


async def test_an_export_is_started_and_shown(world: World, anna: Browser) -> None:
    base = base_of(await an_ended_run(world))
    await anna.open(base)

    answer = await anna.send(f"{base}/export", {"format": "jsonl"})

    assert "Export as jsonl: pending" in (await anna.open(answer.location)).words


async def test_an_audit_shows_what_it_counted(world: World, anna: Browser) -> None:
    base = base_of(await an_ended_run(world))
    await anna.open(base)

    answer = await anna.send(f"{base}/audit")

    assert "The rows match the counters." in answer.words


async def test_a_budget_and_a_host_limit_are_set(world: World, anna: Browser) -> None:
    submitted = await an_ended_run(world)
    job = f"/ui/jobs/{submitted['job_id']}"
    await anna.open(job)

    await anna.send(f"{job}/budget", {"budget_credits": "500"})
    await anna.send(f"{job}/host-limits", {"host": "example.com", "host_concurrency": "3"})
    await anna.send(f"{job}/host-limits", {"host_rate": "0.5"})

    shown = await world.get(f"/v1/jobs/{submitted['job_id']}")
    assert shown.json["budget"] == {"credits": 500}
    assert shown.json["host_limits"] == {
        "rate_per_s": 0.5,
        "hosts": {"example.com": {"concurrency": 3}},
    }


async def test_the_last_host_limit_can_be_removed(world: World, anna: Browser) -> None:
    submitted = await world.submit(host_limits={"hosts": {"example.com": {"concurrency": 3}}})
    job = f"/ui/jobs/{submitted['job_id']}"
    await anna.open(job)

    await anna.send(f"{job}/host-limits", {"host": "example.com"})

    assert "host_limits" not in (await world.get(f"/v1/jobs/{submitted['job_id']}")).json


async def test_a_deletion_asks_for_confirmation_first(world: World, anna: Browser) -> None:
    submitted = await an_ended_run(world)
    job = f"/ui/jobs/{submitted['job_id']}"

    asked = await anna.open(f"{job}/delete")
    still_there = (await world.get(f"/v1/jobs/{submitted['job_id']}")).status
    await anna.send(f"{job}/delete")

    assert "This cannot be undone." in asked.words
    assert still_there == 200
    assert (await world.get(f"/v1/jobs/{submitted['job_id']}")).status == 404


async def test_a_list_can_be_validated_before_it_is_submitted(world: World, anna: Browser) -> None:
    await anna.open("/ui/jobs/new")
    fields = {"urls": "https://example.com/1\nnot a url\nhttps://example.com/2", "name": "new"}

    checked = await anna.send("/ui/jobs/new", {**fields, "do": "check"})

    assert "2 valid lines, 1 invalid." in checked.words
    assert "line 2:" in checked.words
    assert "https://example.com/2" in checked.text
    assert (await world.get("/v1/jobs")).json["jobs"] == []


async def test_a_list_is_submitted_with_its_limits(world: World, anna: Browser) -> None:
    await anna.open("/ui/jobs/new")
    fields = {
        "urls": "https://example.com/1\r\n\r\nhttps://example.com/2\r\n",
        "name": "new",
        "max_inflight": "7",
        "host_rate": "0.5",
        "budget_cost": "1.50",
        "params": "js_render=true",
        "do": "submit",
    }

    answer = await anna.send("/ui/jobs/new", fields)

    (job,) = (await world.get("/v1/jobs")).json["jobs"]
    assert answer.location.startswith(f"/ui/jobs/{job['job_id']}/runs/")
    assert (job["name"], job["max_inflight"]) == ("new", 7)
    assert job["latest_run"]["stats"]["total"] == 2
    assert job["zenrows_params"] == {"js_render": "true"}


async def test_a_form_of_a_refused_job_keeps_the_entered_values(
    world: World, anna: Browser
) -> None:
    await anna.open("/ui/jobs/new")
    fields = {"urls": "https://example.com/1", "max_inflight": "many", "do": "submit"}

    answer = await anna.send("/ui/jobs/new", fields)

    assert answer.status == 400
    assert "https://example.com/1" in answer.text
    assert 'value="many"' in answer.text


async def test_a_refused_list_shows_its_invalid_lines(world: World, anna: Browser) -> None:
    page = await anna.open("/ui/jobs/new")
    (once,) = set(re.findall(r'name="once" value="(\w+)"', page.text))
    fields = {"urls": "https://example.com/1\nno url", "do": "submit", "once": once}

    answers = [await anna.send("/ui/jobs/new", fields) for _ in range(2)]

    assert [answer.status for answer in answers] == [400, 400]
    for answer in answers:
        assert "line 2: malformed url no url" in " ".join(answer.words.split())


async def test_an_uploaded_file_is_submitted_together_with_pasted_lines(
    world: World, anna: Browser
) -> None:
    await anna.open("/ui/jobs/new")
    parts = {"token": anna.token, "do": "submit", "urls": "https://example.com/pasted"}
    body = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in parts.items()
    )
    body += (
        '--x\r\nContent-Disposition: form-data; name="file"; filename="list.txt"\r\n\r\n'
        "# two more\nhttps://example.com/a\nhttps://example.com/b\n\r\n--x--\r\n"
    )

    await anna.open("/ui/jobs/new", data=body.encode(), kind="multipart/form-data; boundary=x")

    (job,) = (await world.get("/v1/jobs")).json["jobs"]
    assert job["latest_run"]["stats"]["total"] == 3


async def test_a_schedule_is_created_paused_and_fired_by_hand(world: World, anna: Browser) -> None:
    await anna.open("/ui/jobs/new")
    fields = {"urls": "https://example.com/1", "name": "nightly", "cron": "0 4 * * *"}
    made = await anna.send("/ui/jobs/new", {**fields, "do": "submit"})
    job = made.location.partition("?")[0]

    listed = await anna.open("/ui/schedules")
    await anna.send(f"{job}/schedule", {"state": "paused"})
    paused = await anna.open("/ui/schedules")
    fired = await anna.send(f"{job}/rerun")

    assert "nightly" in listed.words
    assert "0 4 * * *" in listed.words
    assert "Resume" in paused.words
    assert fired.location.startswith(f"{job}/runs/")


async def test_webhooks_are_set_tested_and_their_keys_rotated(world: World, anna: Browser) -> None:
    submitted = await world.submit()
    job = f"/ui/jobs/{submitted['job_id']}"
    await anna.open("/ui/webhooks")
    target = {"url": "https://hooks.example/x"}

    made = await anna.send("/ui/webhooks/keys/rotate")
    await anna.send(f"{job}/webhook", target)
    tested = await anna.send("/ui/webhooks/test", target)
    shown = await anna.open(f"/ui/webhooks?job={submitted['job_id']}")

    assert "The secret is shown this once" in made.words
    assert "The test event was delivered" in tested.words
    assert "https://hooks.example/x" in shown.words


async def test_a_webhook_event_is_redelivered(world: World, anna: Browser) -> None:
    submitted = await an_ended_run(world, webhook={"url": "https://hooks.example/x"})
    page = await anna.open(f"/ui/webhooks?job={submitted['job_id']}")
    event_id = re.findall(r'name="event_id" value="(\w+)"', page.text)[0]

    answer = await anna.send(
        f"/ui/jobs/{submitted['job_id']}/webhook/redeliver", {"event_id": event_id}
    )

    assert "The event will be delivered again." in (await anna.open(answer.location)).words


@pytest.mark.parametrize("reason", list(WaitReason))
async def test_every_wait_reason_is_explained_on_the_page(reason: WaitReason) -> None:
    """The reason is reported by a worker, or follows from rows and leases."""
    page = await a_page_that_shows(reason)

    assert f">{reason}</code>" in page.text
    assert WAITS[reason].title in page.words
    assert WAITS[reason].remedy in page.words


def test_every_failure_reason_has_a_text_and_a_remedy() -> None:
    assert set(FailureReason) <= set(FAILURES)
    assert set(FailureReason) == set(REMEDIES)
    assert set(WAITS) == set(WaitReason)
    assert set(EVENTS) == set(EventType)


async def test_no_page_shows_another_callers_job(world: World, anna: Browser) -> None:
    submitted = await an_ended_run(world, key=BERT, external_id="berts-id")
    rows = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
    job, base = f"/ui/jobs/{submitted['job_id']}", base_of(submitted)
    task = f"{base}/tasks/{rows[0].task_id}"

    for path in (job, base, f"{base}/tasks", f"{base}/hosts", f"{base}/timeline", task):
        assert (await anna.open(path)).status == 404, path
        assert (await anna.open(f"/ui/live?page={path}")).status == 404, path
    for path in (f"{task}/preview", f"{task}/content", f"{base}/delete", f"{job}/delete"):
        assert (await anna.open(path)).status == 404, path
    for path in ("/ui/", "/ui/jobs?q=prices", "/ui/jobs?q=berts-id", "/ui/jobs?caller=x"):
        assert submitted["job_id"] not in (await anna.open(path)).text
    assert (await anna.open(f"/ui/webhooks?job={submitted['job_id']}")).status == 404


@pytest.mark.parametrize(
    "action",
    ["pause", "resume", "stop", "rerun", "close", "budget", "host-limits", "delete", "webhook"],
)
async def test_no_form_changes_another_callers_job(
    world: World, anna: Browser, action: str
) -> None:
    submitted = await world.submit(key=BERT)
    await anna.open("/ui/")

    answer = await anna.send(
        f"/ui/jobs/{submitted['job_id']}/{action}",
        {"budget_credits": "1", "host_rate": "1", "url": "https://hooks.example/x"},
    )

    assert answer.status == 404


async def test_hostile_texts_are_shown_and_not_executed(world: World, anna: Browser) -> None:
    url = "https://example.com/?q='><script>alert(1)</script>"
    seen = await world.post(
        "/v1/jobs",
        {
            "name": HOSTILE,
            "external_id": "x",
            "metadata": {"key": HOSTILE},
            "tasks": [{"url": url, "metadata": {"key": HOSTILE}}],
        },
    )
    submitted = seen.json
    base = base_of(submitted)
    (task,) = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
    await world.fail(submitted["job_id"], task)

    for path in (
        "/ui/",
        f"/ui/jobs?q={HOSTILE}",
        f"/ui/jobs/{submitted['job_id']}",
        base,
        f"{base}/tasks?text={HOSTILE}",
        f"{base}/hosts",
        f"{base}/tasks/{task.task_id}",
        f"{base}/delete",
        f"/ui/webhooks?job={submitted['job_id']}",
    ):
        text = (await anna.open(path)).text
        assert "<script>alert" not in text, path
        assert "<img src=x" not in text, path


async def test_a_preview_can_neither_run_scripts_nor_load_anything(
    world: World, anna: Browser
) -> None:
    submitted = await world.submit()
    (task,) = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
    await world.succeed(submitted["job_id"], task, b"<script>alert(1)</script>")
    path = f"{base_of(submitted)}/tasks/{task.task_id}"

    page = await anna.open(path)
    preview = await anna.open(f"{path}/preview")
    download = await anna.open(f"{path}/content")

    assert re.search(r'<iframe[^>]+sandbox=""', page.text)
    policy = preview.headers["Content-Security-Policy"]
    assert policy.startswith("sandbox; default-src 'none';")
    assert download.headers["Content-Disposition"].startswith("attachment")


async def test_an_unknown_address_shows_an_error_page(world: World, anna: Browser) -> None:
    for path in ("/ui/nothing", "/ui/jobs/x/y/z", "/ui/static/none.css", "/ui/static/..%5cx.css"):
        answer = await anna.open(path)
        assert answer.status == 404, path
        assert answer.headers["Content-Type"].startswith("text/html")


async def test_an_operator_can_filter_jobs_by_caller() -> None:
    world = make_ui_world()
    await world.submit(name="of anna")
    submitted = await world.submit(key=BERT, name="of bert")
    caller = (await world.run(submitted["job_id"], submitted["latest_run"]["run_id"])).caller
    operator = Browser(world)
    await operator.sign_in("an-operators-key")

    page = await operator.open(f"/ui/jobs?caller={caller}")

    assert "of bert" in page.words
    assert "of anna" not in page.words
