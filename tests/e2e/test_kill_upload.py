"""Tests crashes while a list is uploaded, submitted and ingested."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_site, until

pytestmark = pytest.mark.slow

LINES = 1_050  # Two chunks.
POINTS = [
    f"{call}:{count}:{side}"
    for count, calls in (
        (1, ("blobs.put_stream", "blobs.copy", "blobs.open", "store.put_chunk")),
        (2, ("blobs.open", "store.commit", "store.put_chunk")),
        (6, ("store.commit",)),
    )
    for call in calls
    for side in ("before", "after")
]


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_during_upload_or_ingest_loses_no_line(tmp_path: Path, point: str) -> None:
    data = tmp_path / "data"
    server = Server(data)
    with a_site() as site:
        good = site.urls(LINES - 3)
        content = "\n".join([*good[:1000], "ftp://x", *good[1000:], "y", "http://"]).encode()
        server.start(TEST_CRASH_AT=point)
        try:
            first = _try(server, content)
            until("the crash", lambda: server.has_ended() or None)
            assert server.process is not None
            assert server.process.wait() == 137
            server.start()
            second = _try(server, content)
            assert second is not None
            run = until("the run to end", lambda: server.ended_run(second))
            jobs = server.call("GET", "/v1/jobs").json()["jobs"]
        finally:
            server.kill()

    assert first in (None, second)
    assert len(jobs) == 1
    assert run["status"] == "completed"
    assert run["stats"]["total"] == run["stats"]["completed"] == LINES
    assert run["stats"]["failure_reasons"]["bad_target"] >= 3
    assert violations(data) == []
    assert list((data / "temp").iterdir()) == []


def _try(server: Server, content: bytes) -> str | None:
    """Uploads and submits. Returns the job's id, or None if the server crashed."""
    if server.url == "ended":
        return None
    try:
        return _submit(server, content)
    except httpx.TransportError:
        return None


def _submit(server: Server, content: bytes) -> str:
    slot = server.call(
        "POST", "/v1/job_inputs", json={"format": "text"}, headers={"Idempotency-Key": "slot"}
    ).json()
    path = slot["upload"]["url"].split("/", 3)[3]
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as bare:
        assert bare.put(f"/{path}", content=content).status_code == 200
    body = {"file_input_id": slot["file_input_id"], "max_inflight": 200}
    answer = server.call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": "job"})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])
