"""Measures how soon a stop reaches every process, and how soon a killed one is replaced."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.cloud import a_client, aws_deployment
from tests.e2e.hanging import HangingSite, a_hanging_site
from tests.e2e.programs import Server, until
from tests.e2e.test_processes import helper_pids
from tests.servers import a_redis, free_port

pytestmark = pytest.mark.slow

CAP = 20
STOP_S_MAX = 12.0
RECOVERY_S_MAX = 60.0


def _wait_until_closed(site: HangingSite, since: float) -> float:
    until("every socket to be closed", lambda: site.open_count == 0 or None)
    return time.monotonic() - since


def _start_run(client: httpx.Client, site: HangingSite) -> str:
    body = {"tasks": site.tasks(200), "max_inflight": CAP}
    job_id = str(client.post("/v1/jobs", json=body).json()["job_id"])
    # More connections than one of the two workers can have.
    until("fetches", lambda: site.open_count > CAP // 2 or None)
    return job_id


@pytest.mark.parametrize("end", ["stop", "delete"])
def test_a_stop_or_delete_ends_fetches_without_redis_in_time(
    request: pytest.FixtureRequest, tmp_path: Path, end: str
) -> None:
    with aws_deployment(request, tmp_path) as cloud, a_hanging_site() as site:
        cloud.workers(2, CONVEYOR_CONCURRENCY=str(CAP // 2))
        with a_client(cloud.api()) as client:
            job_id = _start_run(client, site)

            asked_at = time.monotonic()
            if end == "stop":
                receipt = client.post(f"/v1/jobs/{job_id}/stop").json()["receipt"]
                assert receipt["inflight"] != 0 or site.open_count == 0, receipt
            else:
                assert client.delete(f"/v1/jobs/{job_id}").is_success
            seconds = _wait_until_closed(site, asked_at)

    print(f"{end} without Redis: the last socket was closed after {seconds:.1f} s")
    assert seconds <= STOP_S_MAX


def test_a_stop_while_redis_is_away_ends_fetches_and_reports_unknown_counts(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with ExitStack() as redis, a_hanging_site() as site:
        url = redis.enter_context(a_redis(tmp_path / "redis", free_port()))
        with aws_deployment(request, tmp_path, redis=url) as cloud, a_client(cloud.api()) as client:
            cloud.workers(2, CONVEYOR_CONCURRENCY=str(CAP // 2))
            job_id = _start_run(client, site)
            redis.close()

            asked_at = time.monotonic()
            receipt = client.post(f"/v1/jobs/{job_id}/stop").json()["receipt"]
            seconds = _wait_until_closed(site, asked_at)

    print(f"stop without its Redis: {receipt}, the last socket was closed after {seconds:.1f} s")
    assert (receipt["complete"], receipt["inflight"], receipt["leases"]) == (False, None, None)
    assert seconds <= STOP_S_MAX


def test_a_deleted_job_leaves_no_fetch_in_any_process(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", arguments=("--processes", "2"))
    server.start(CONVEYOR_CONCURRENCY=str(CAP))
    try:
        with a_hanging_site() as site:
            body = {"tasks": site.tasks(200), "max_inflight": CAP}
            job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
            until("fetches", lambda: site.open_count >= CAP or None, deadline_s=30)

            asked_at = time.monotonic()
            server.call("DELETE", f"/v1/jobs/{job_id}")
            seconds = _wait_until_closed(site, asked_at)
    finally:
        server.kill()

    print(f"delete over two processes: the last socket was closed after {seconds:.1f} s")
    assert seconds <= STOP_S_MAX


def test_tasks_of_a_killed_process_are_fetched_again_within_a_minute(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path / "data", arguments=("--processes", "2"))
    server.start(CONVEYOR_CONCURRENCY=str(CAP))
    try:
        with a_hanging_site() as site:
            body = {"tasks": site.tasks(CAP), "max_inflight": CAP}
            server.call("POST", "/v1/jobs", json=body)
            until("fetches", lambda: len(set(site.requested_paths)) == CAP or None)
            (victim,) = helper_pids(server)

            os.kill(victim, signal.SIGKILL)
            killed_at = time.monotonic()
            lost_count = CAP // 2
            until(
                "its pages to be requested again",
                lambda: len(site.requested_paths) >= CAP + lost_count or None,
                deadline_s=120,
            )
            seconds = time.monotonic() - killed_at
    finally:
        server.kill()

    print(f"the pages of a killed process were requested again after {seconds:.1f} s")
    assert seconds <= RECOVERY_S_MAX
