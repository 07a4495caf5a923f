"""Tests the stop of a run whose site never answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conveyor.process_status import read_snapshot
from tests.e2e.audit import violations
from tests.e2e.programs import a_server, until

pytestmark = pytest.mark.slow


@contextmanager
def a_silent_site() -> Iterator[int]:
    """Runs a site that accepts every connection and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        yield listening.getsockname()[1]


def test_a_stop_with_200_fetches_in_flight_releases_every_task_and_lease(tmp_path: Path) -> None:
    with a_silent_site() as port, a_server(tmp_path / "data") as server:
        urls = [{"url": f"http://127.0.0.1:{port}/{number}"} for number in range(400)]
        body = {"tasks": urls, "max_inflight": 200}
        job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
        until("200 in flight", lambda: read_snapshot(tmp_path / "data").inflight >= 200 or None)

        started_at = time.monotonic()
        answer = server.call("POST", f"/v1/jobs/{job_id}/stop")
        seconds = time.monotonic() - started_at

        run = answer.json()
        assert answer.status_code == 200
        assert run["status"] == "stopped"
        assert run["stats"]["inflight"] == 0
        assert run["receipt"]["inflight"] == 0
        assert run["receipt"]["leases"] == 0
        assert run["stats"]["pending"] == run["stats"]["total"] == 400
        snapshot = read_snapshot(tmp_path / "data")
        (worker,) = [node for node in snapshot.tree.children if node.name == "worker"]
        (runs,) = [node for node in worker.children if node.name == "runs"]
        assert runs.children == ()
        assert snapshot.inflight == 0
        later = server.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
        assert later["stats"] == run["stats"]
        assert violations(tmp_path / "data") == []
        print(f"stopped 200 fetches in {seconds:.3f} s")
