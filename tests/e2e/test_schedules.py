"""`kill -9` around a fire: its nominal time still makes one run, and a whole one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_site, until

pytestmark = pytest.mark.slow

PAGES = 30

# The first commit takes the job, and the second fires it; then its list is put.
POINTS = [
    f"{call}:{side}"
    for call in ("store.commit:2", "store.put_chunk:1")
    for side in ("before", "after")
]


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_around_a_fire_leaves_one_whole_run(tmp_path: Path, point: str) -> None:
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
