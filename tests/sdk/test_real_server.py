"""The client with the real server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from conveyor import sdk
from conveyor.cli.demo import Site
from conveyor.sdk import (
    ApiError,
    Cadence,
    CalendarInput,
    Client,
    CreateJobInputRequest,
    CsvFields,
    CsvInput,
    HmacKeyList,
    JobSchedule,
    Monthly,
    RateInput,
    RunResponse,
    SubmitJobRequest,
    TaskInput,
    WebhookInput,
)
from conveyor.sdk.client import JOBS_PAGE
from tests.cli.program import wait_until

pytestmark = pytest.mark.slow

MISSING = 7


def test_a_job_is_submitted_finished_and_deleted(
    caller: Client, site: Site, tmp_path: Path
) -> None:
    seen: list[RunResponse] = []

    job = caller.submit(site.urls(9))
    run = caller.wait(job.job_id, seen.append, timeout_s=30)
    results = sorted(caller.results(job.job_id), key=lambda result: result.index)
    saved = caller.download(job.job_id, results[3].task_id, tmp_path / "page")

    assert job.accepted_tasks == 9
    assert seen[-1] == run
    assert (run.terminal, run.stats.successful, run.stats.failed) == (True, 8, 1)
    assert [result.url for result in results] == site.urls(9)
    assert caller.content(job.job_id, results[3].task_id) == (tmp_path / "page").read_bytes()
    assert saved.content_type.startswith("text/html")
    assert len(caller.history(job.job_id, results[3].task_id)) == 2
    (failed,) = caller.results(job.job_id, status="failed")
    assert failed.index == MISSING
    with pytest.raises(ApiError, match="422 target_404"):
        caller.content(job.job_id, failed.task_id)

    again = caller.rerun(job.job_id, statuses=["failed"])
    caller.wait(job.job_id, run_id=again.latest_run.run_id)
    assert (again.retried_tasks, again.inherited_tasks) == (1, 8)
    assert [run.run_sequence for run in caller.runs(job.job_id)] == [2, 1]
    assert [job.job_id for job in caller.list(status="closed")] == [job.job_id]

    caller.delete(job.job_id)
    assert list(caller.list()) == []
    with pytest.raises(ApiError, match="404 not_found"):
        caller.get(job.job_id)


def test_a_scheduled_job_fires_at_its_time(caller: Client, site: Site) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=3)
    schedule = JobSchedule(at=soon.strftime("%Y-%m-%dT%H:%M:%S"), timezone="UTC")
    tasks = [TaskInput(url=url) for url in site.urls(3)]

    job = caller.submit(SubmitJobRequest(type="scheduled", schedule=schedule, tasks=tasks))
    wait_until(lambda: caller.get(job.job_id).latest_run)
    run = caller.wait(job.job_id, timeout_s=30)

    assert job.latest_run is None
    assert (run.status, run.trigger, run.stats.successful) == ("completed", "scheduled", 3)
    assert run.scheduled_for == f"{schedule.at}.000Z"
    assert caller.get(job.job_id).next_scheduled_run is None


def test_a_schedule_is_replaced_paused_and_resumed(caller: Client) -> None:
    rate = JobSchedule(rate=RateInput(every=1, unit="day"))
    tasks = [TaskInput(url="https://example.com/")]
    job = caller.submit(SubmitJobRequest(type="scheduled", schedule=rate, tasks=tasks))
    cadence = Cadence(monthly=Monthly(days=[31]))
    calendar = CalendarInput(times_of_day=["09:30"], cadence=cadence)
    monthly = JobSchedule(calendar=calendar, timezone="Europe/Berlin", overlap="queue")

    changed = caller.set_schedule(job.job_id, monthly)
    paused = caller.set_schedule_state(job.job_id, "paused")
    resumed = caller.set_schedule_state(job.job_id, "active")

    assert changed.schedule == monthly
    assert (paused.schedule_state, resumed.schedule_state) == ("paused", "active")
    assert paused.next_scheduled_run == resumed.next_scheduled_run is not None


def test_an_open_job_is_filled_paused_resumed_and_closed(caller: Client, site: Site) -> None:
    job = caller.submit(SubmitJobRequest(status="open", max_inflight=1))

    paused = caller.pause(job.job_id)
    added = caller.add_tasks(job.job_id, site.urls(3))
    resumed = caller.resume(job.job_id)
    closed = caller.close(job.job_id)
    run = caller.wait(job.job_id, timeout_s=30)

    assert (paused.pause_state, resumed.pause_state) == ("paused", None)
    assert (added.accepted_tasks, closed.status) == (3, "closed")
    assert run.stats.successful == 3


def test_a_stop_returns_a_receipt(caller: Client, site: Site) -> None:
    job = caller.submit(SubmitJobRequest(status="open"))
    caller.add_tasks(job.job_id, site.urls(50), last=True)

    stopped = caller.stop(job.job_id)

    assert (stopped.terminal, stopped.status) == (True, "stopped")
    assert stopped.receipt is not None
    assert stopped.receipt.inflight == 0


def test_a_job_is_submitted_once_under_one_idempotency_key(caller: Client, site: Site) -> None:
    first = caller.submit(site.urls(1), idempotency_key="mine")
    second = caller.submit(site.urls(1), idempotency_key="mine")

    assert first == second
    assert len(list(caller.list())) == 1


def test_a_wait_for_an_unfinished_run_ends_in_a_timeout(caller: Client) -> None:
    job = caller.submit(SubmitJobRequest(status="open"))

    with pytest.raises(TimeoutError):
        caller.wait(job.job_id, timeout_s=0.2)


def test_all_jobs_are_listed_across_several_pages(caller: Client) -> None:
    count = JOBS_PAGE + 1
    job_ids = [caller.submit(SubmitJobRequest(status="open")).job_id for _ in range(count)]

    assert [job.job_id for job in caller.list()] == job_ids[::-1]


def test_every_public_name_of_the_sdk_exists_and_the_list_is_sorted() -> None:
    assert all(hasattr(sdk, name) for name in sdk.__all__)
    assert sdk.__all__ == sorted(sdk.__all__)


def test_a_webhook_is_tested_set_redelivered_and_removed(caller: Client, site: Site) -> None:
    assert caller.hmac_keys() == HmacKeyList()
    first, second = caller.rotate_hmac_key(), caller.rotate_hmac_key()
    caller.finalize_hmac_key()
    caller.cancel_hmac_rotation()
    nowhere = WebhookInput(url="http://127.0.0.1:9/hook", signature=True)

    tested = caller.test_webhook(nowhere)
    job = caller.submit(site.urls(1))
    was_set = caller.set_webhook(job.job_id, nowhere)
    webhook = caller.webhook(job.job_id)
    caller.wait(job.job_id)
    again = caller.rerun(job.job_id)
    caller.wait(job.job_id, run_id=again.latest_run.run_id)
    events = {event.run_id: event for event in caller.deliveries(job.job_id)}
    redelivered = caller.redeliver(job.job_id, events[again.latest_run.run_id].event_id)
    caller.remove_webhook(job.job_id)

    keys = caller.hmac_keys()
    assert first.kid != second.kid
    assert keys.active is not None
    assert (keys.active.kid, keys.candidate) == (second.kid, None)
    assert (tested.delivered, tested.error) == (False, "transport_error:connection refused")
    assert was_set == webhook
    assert redelivered.status == "due"
    with pytest.raises(ApiError, match="404 not_found"):
        caller.webhook(job.job_id)


def test_an_uploaded_list_becomes_a_job(caller: Client, site: Site, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("".join(f"n{number},{url}\n" for number, url in enumerate(site.urls(3))))
    fields = CsvFields(url=1, external_id=0)

    input_id = caller.upload(rows, CreateJobInputRequest(csv=CsvInput(fields=fields)))
    job = caller.submit(SubmitJobRequest(file_input_id=input_id))
    caller.wait(job.job_id, timeout_s=30)

    seen = {(result.external_id, result.url) for result in caller.results(job.job_id)}
    assert seen == {(f"n{number}", url) for number, url in enumerate(site.urls(3))}
