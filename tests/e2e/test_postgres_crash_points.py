"""Tests crashes of the program before and after calls to the Postgres engine."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tests.e2e.postgres_audit import violations
from tests.e2e.programs import Server, a_site, until
from tests.servers import a_postgres

pytestmark = pytest.mark.slow

SHORT, LONG = 40, 1_100
SOME = [("store.put_chunk:1:after", LONG)]
EACH = [
    (f"{call}:{count}:{side}", pages)
    for pages, count, calls in (
        (SHORT, 1, ("store.commit", "store.read", "store.find", "queue.receive", "queue.ack")),
        (SHORT, 1, ("queue.close_run", "blobs.add", "coordinator.acquire")),
        (SHORT, 4, ("store.commit", "queue.receive", "blobs.add")),
        (LONG, 1, ("store.put_chunk", "blobs.put", "blobs.open")),
    )
    for call in calls
    for side in ("before", "after")
]
# The leases and claims of a crashed process need 90 s to expire: one point by default.
POINTS = EACH if os.environ.get("CONVEYOR_TEST_CRASH_POINTS") == "each" else SOME


@pytest.mark.parametrize(("point", "pages"), POINTS)
def test_a_crash_at_an_engine_call_loses_nothing(tmp_path: Path, point: str, pages: int) -> None:
    """A retry with the same key returns the same job, whether or not the first was answered."""
    bodies = tmp_path / "bodies"
    with a_site() as site, a_postgres(()) as database:
        environ = {
            "CONVEYOR_ENGINE": "postgres",
            "CONVEYOR_DATABASE_URL": database.url,
            "CONVEYOR_BLOB_DIR": str(bodies),
            "CONVEYOR_SECRET_KEY": "between processes",
        }
        server = Server(tmp_path / "data", environ=environ)
        body = {"tasks": [{"url": url} for url in site.urls(pages)], "max_inflight": 20}
        server.start(TEST_CRASH_AT=point)
        try:
            first = _submit(server, body)
            until("the crash", lambda: server.has_ended() or None)
            assert server.process is not None
            assert server.process.wait() == 137
            server.start()
            # The key of the crashed request is claimed for up to 90 s.
            second = until("the retry", lambda: _submit(server, body))
            run = until("the run to end", lambda: server.ended_run(second))
            jobs = server.call("GET", "/v1/jobs").json()["jobs"]
            problems = violations(database.url, bodies)
        finally:
            server.kill()

    assert first in (None, second)
    assert len(jobs) == 1
    assert run["stats"]["total"] == run["stats"]["completed"] == pages
    assert problems == []


def _submit(server: Server, body: object) -> str | None:
    """Submits. Returns the job's id, or None if the server crashed or the key is still claimed."""
    if server.url == "ended":
        return None
    try:
        answer = server.call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": "the same"})
    except httpx.TransportError:
        return None
    if answer.status_code == 409:
        return None
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job_id"])
