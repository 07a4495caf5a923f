"""Tests crashes at every engine call that stages or ingests a long inline list."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_server, a_site, until

pytestmark = pytest.mark.slow

LINES = 2_100  # Three chunks, in a body of over half a megabyte.
SETTINGS = {"CONVEYOR_SYNC_TASKS_MAX": "2000"}
POINTS = [
    f"{call}:{count}:{side}"
    for count, calls in (
        (1, ("blobs.put_stream", "blobs.open", "store.put_chunk", "store.commit", "store.find")),
        (2, ("store.put_chunk", "store.commit", "store.read")),
        (3, ("store.put_chunk", "store.commit", "store.read")),
        (4, ("store.commit", "store.read")),
    )
    for call in calls
    for side in ("before", "after")
]


@pytest.mark.parametrize("point", POINTS)
def test_every_line_of_a_long_list_is_ingested_once_after_a_crash(
    tmp_path: Path, point: str
) -> None:
    data = tmp_path / "data"
    server = Server(data, environ=SETTINGS)
    with a_site() as site:
        lines = [{"url": url, "metadata": {"note": "x" * 250}} for url in site.urls(LINES)]
        body = {"tasks": lines, "max_inflight": 1}
        server.start(TEST_CRASH_AT=point)
        try:
            first = _submit(server, body)
            until("the crash", lambda: server.has_ended() or None)
            assert server.process is not None
            assert server.process.wait() == 137
            server.start()
            second = _submit(server, body)
            assert second is not None
            until("the list to be ingested", lambda: _is_ingested(server, second))
            stopped = server.call("POST", f"/v1/jobs/{second}/stop").json()
            indexes = _indexes(server, second)
            jobs = server.call("GET", "/v1/jobs").json()["jobs"]
        finally:
            server.kill()

    assert first in (None, second)
    assert len(jobs) == 1
    assert stopped["stats"]["total"] == LINES
    assert sorted(indexes) == list(range(LINES))
    assert violations(data) == []
    assert list((data / "temp").iterdir()) == []


def _submit(server: Server, body: object) -> str | None:
    """Submits a job. Returns its id, or None if the server crashed before it answered."""
    if server.url == "ended":
        return None
    try:
        answer = server.call("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": "the same"})
    except httpx.TransportError:
        return None
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


def _is_ingested(server: Server, job_id: str) -> bool | None:
    run = server.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
    return run["ingest_status"] == "done" or None


def _indexes(server: Server, job_id: str) -> list[int]:
    indexes: list[int] = []
    cursor: dict[str, Any] = {}
    while True:
        page = server.call(
            "GET", f"/v1/jobs/{job_id}/results", params={"limit": 1000, "status": "all", **cursor}
        ).json()
        indexes += [result["index"] for result in page["results"]]
        if not page.get("next_cursor"):
            return indexes
        cursor = {"cursor": page["next_cursor"]}


def test_an_interrupted_request_leaves_no_job_and_no_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with a_server(data) as server:
        address = httpx.URL(server.url)
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: {address.host}\r\nX-API-Key: tests\r\n"
            "Content-Type: application/json\r\nContent-Length: 100000000\r\n\r\n"
        )
        line = '{"url":"https://example.com/page"},'
        with socket.create_connection((address.host, address.port or 80)) as connection:
            connection.sendall((head + '{"tasks":[' + line * 60_000).encode())
            until("the list to be staged", lambda: list((data / "temp").iterdir()) or None)

        until("it to be gone", lambda: not list((data / "temp").iterdir()) or None)
        jobs = server.call("GET", "/v1/jobs").json()["jobs"]

    assert jobs == []
    assert [path for path in (data / "blobs").rglob("*") if path.is_file()] == []
