"""Tests exports of a real server that crashes at important calls of the exporter.

tests/usecases tests every call of the exporter, without a process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.sdk.downloads import verify_export
from tests.e2e.programs import Server, a_server, a_site, until

pytestmark = pytest.mark.slow

PAGES = 60
KEY = {"Idempotency-Key": "the same"}


def an_ended_run(server: Server, urls: list[str]) -> str:
    """Runs a job to its end, and returns the URL of its exports."""
    answer = server.call("POST", "/v1/jobs", json={"tasks": [{"url": url} for url in urls]})
    job_id = answer.json()["job_id"]
    run = until("the run to end", lambda: server.ended_run(job_id))
    return f"/v1/jobs/{job_id}/runs/{run['run_id']}/exports"


def start_export(server: Server, address: str) -> str | None:
    """Starts an export. Returns its id, or None if the server crashed before it answered."""
    if server.url == "ended":
        return None
    try:
        answer = server.call("POST", address, headers=KEY)
    except httpx.TransportError:
        return None
    assert answer.status_code == 202, answer.text
    return str(answer.json()["export_id"])


def completed(server: Server, address: str, export_id: str) -> dict[str, Any] | None:
    """Returns the export when it is completed; before that it has no file."""
    export: dict[str, Any] = server.call("GET", f"{address}/{export_id}").json()
    if export["status"] != "completed":
        assert "download_url" not in export
        assert export["status"] in {"pending", "running"}
        return None
    return export


POINTS = [
    f"{call}:{count}:{side}"
    for call, counts in (
        ("store.commit", (2, 4, 5)),
        ("blobs.open", (30,)),
        ("blobs.put_stream", (1,)),
    )
    for count in counts
    for side in ("before", "after")
]


@pytest.mark.parametrize("point", POINTS)
def test_an_export_completes_after_a_crash_at_an_engine_call(tmp_path: Path, point: str) -> None:
    with a_site() as site, a_server(tmp_path / "data") as server:
        address = an_ended_run(server, site.urls(PAGES))
        server.stop()

        server.start(TEST_CRASH_AT=point)
        first = start_export(server, address)
        until("the crash", lambda: server.has_ended() or None)
        server.start()
        second = start_export(server, address)
        assert second is not None
        export = until("the export", lambda: completed(server, address, second))
        content = httpx.get(export["download_url"], timeout=60, trust_env=False)

    path = tmp_path / "out.zip"
    path.write_bytes(content.content)
    assert first in (None, second)
    assert verify_export(path).entries == PAGES
    assert list((tmp_path / "data" / "temp").iterdir()) == []
