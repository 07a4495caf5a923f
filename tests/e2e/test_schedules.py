"""Tests crashes while a schedule fires: each fire creates exactly one complete run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_site, until

pytestmark = pytest.mark.slow

PAGES = 30

# The first commit creates the job, the second fires the schedule; then the list is ingested.
POINTS = [
    f"{call}:{side}"
    for call in ("store.commit:2", "store.put_chunk:1")
    for side in ("before", "after")
]


@pytest.mark.parametrize("point", POINTS)
def test_a_fire_creates_one_complete_run_despite_a_crash(tmp_path: Path, point: str) -> None:
    data = tmp_path / "data"
    server = Server(data)
    with a_site() as site:
        server.start(TEST_CRASH_AT=point)
        try:
            soon = datetime.now(UTC) + timedelta(seconds=3)
            at = soon.strftime("%Y-%m-%dT%H:%M:%S")
            schedule = {"at": at, "timezone": "UTC"}
            tasks = [{"url": url} for url in site.urls(PAGES)]
            body = {"type": "scheduled", "schedule": schedule, "tasks": tasks}
            job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
            until("the crash", lambda: server.has_ended() or None)
            server.start()
            until("the run to begin", lambda: _runs(server, job_id) or None)
            ended = until("the run to end", lambda: server.ended_run(job_id))
            runs = _runs(server, job_id)
        finally:
            server.kill()

    assert [run["scheduled_for"] for run in runs] == [f"{at}.000Z"]
    assert ended["status"] == "completed"
    assert ended["stats"]["total"] == ended["stats"]["completed"] == PAGES
    assert violations(data) == []


def _runs(server: Server, job_id: str) -> list[dict[str, object]]:
    runs: list[dict[str, object]] = server.call("GET", f"/v1/jobs/{job_id}/runs").json()["runs"]
    return runs
