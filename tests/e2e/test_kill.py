"""Tests `kill -9` at many moments: no accepted task is lost, and none is counted twice."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_server, a_site, until

pytestmark = pytest.mark.slow

PAGES = 600
KILLS = 22


@pytest.mark.parametrize(("processes", "kills_max"), [(1, KILLS), (2, 6)])
def test_every_accepted_task_ends_once_whenever_the_server_is_killed(
    tmp_path: Path, processes: int, kills_max: int
) -> None:
    """One job runs while its server is killed repeatedly, at random moments."""
    moments = random.Random(7)
    arguments = ("--processes", str(processes))
    with a_site() as site, a_server(tmp_path / "data", arguments) as server:
        tasks = [{"url": url} for url in site.urls(PAGES)]
        answer = server.call("POST", "/v1/jobs", json={"tasks": tasks, "max_inflight": 20})
        job_id = answer.json()["job_id"]

        kills = 0
        while kills < kills_max:
            _wait_for_progress(server, job_id, moments.randrange(1, PAGES // KILLS))
            time.sleep(moments.uniform(0.0, 1.0))  # A moment that is not tied to an event.
            server.kill()
            kills += 1
            assert violations(tmp_path / "data") == []
            server.start()
        run = until("the run to end", lambda: server.ended_run(job_id))

        missing = sum(number % 50 == 7 for number in range(PAGES))
        assert run["status"] == "completed"
        assert run["stats"]["successful"] == PAGES - missing
        assert run["stats"]["failed"] == missing
        assert violations(tmp_path / "data") == []


def _wait_for_progress(server: Server, job_id: str, steps: int) -> None:
    def completed() -> int:
        job = server.call("GET", f"/v1/jobs/{job_id}").json()
        return int(job["latest_run"]["stats"]["completed"])

    start = completed()
    until("progress", lambda: completed() >= min(start + steps, PAGES) or None, deadline_s=60)


# A short list is ingested with its submit; one of over 1,000 lines is staged and ingested later.
SHORT, LONG = 120, 1_100
POINTS = [
    (f"{call}:{count}:{side}", pages)
    for pages, count, calls in (
        (SHORT, 1, ("store.commit", "store.read", "store.find", "queue.receive", "queue.ack")),
        (SHORT, 1, ("queue.bounce", "queue.close_run", "blobs.add", "coordinator.acquire")),
        (SHORT, 4, ("store.commit", "store.read", "queue.receive", "blobs.add", "queue.ack")),
        (LONG, 1, ("store.put_chunk", "blobs.put", "blobs.open")),
        (LONG, 2, ("store.put_chunk", "store.commit")),
    )
    for call in calls
    for side in ("before", "after")
]


@pytest.mark.parametrize(("point", "pages"), POINTS)
def test_a_crash_at_an_engine_call_loses_nothing(tmp_path: Path, point: str, pages: int) -> None:
    """A retry with the same key returns the same job, whether or not the first was answered."""
    data = tmp_path / "data"
    server = Server(data)
    with a_site() as site:
        body = {"tasks": [{"url": url} for url in site.urls(pages)]}
        server.start(TEST_CRASH_AT=point)
        try:
            first = _submit(server, body)
            until("the crash", lambda: server.has_ended() or None)
            assert server.process is not None
            assert server.process.wait() == 137
            server.start()
            second = _submit(server, body)
            assert second is not None
            run = until("the run to end", lambda: server.ended_run(second))
            jobs = server.call("GET", "/v1/jobs").json()["jobs"]
        finally:
            server.kill()

    assert first in (None, second)
    assert len(jobs) == 1
    assert run["stats"]["total"] == run["stats"]["completed"] == pages
    assert violations(data) == []


def _submit(server: Server, body: object) -> str | None:
    """Submits a job. Returns its id, or None if the server crashed before it answered."""
    if server.url == "ended":
        return None
    try:
        answer = server.call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": "the same"})
    except httpx.TransportError:
        return None
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job_id"])
