"""Tests tasks in Postgres with everything else on the AWS engine. Processes and the database are
killed under load: no task is lost, and none is counted twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trio

from tests.e2e.aws_audit import rows_of
from tests.e2e.cloud import Cloud, a_client, aws_deployment, ended_run, on_postgres, run_of
from tests.e2e.pages import some_pages
from tests.e2e.programs import until
from tests.postgres import execute
from tests.servers import Postgres, a_postgres

pytestmark = pytest.mark.slow

PAGES = 900
_COUNTED = """
SELECT (SELECT count(*) FROM tasks), (SELECT count(*) FROM tasks WHERE status = 'successful'),
    sum(admitted)::bigint, sum(done)::bigint, sum(successful)::bigint FROM stats
"""


@dataclass(frozen=True)
class Deployment:
    cloud: Cloud
    database: Postgres


@contextmanager
def mixed_deployment(request: pytest.FixtureRequest, folder: Path) -> Iterator[Deployment]:
    with (
        a_postgres(()) as database,
        aws_deployment(request, folder, **on_postgres(database)) as cloud,
    ):
        yield Deployment(cloud, database)


def _ended(client: httpx.Client, job_id: str) -> dict[str, object] | None:
    """Returns the run when it has ended. The API answers 503 while a store is down."""
    answer = client.get(f"/v1/jobs/{job_id}")
    return None if answer.status_code == 503 else ended_run(client, job_id)


def test_killed_processes_and_a_killed_database_lose_no_task(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with (
        mixed_deployment(request, tmp_path) as deployment,
        some_pages(think_s=0.2) as pages,
        a_client(deployment.cloud.api()) as client,
    ):
        cloud, database = deployment.cloud, deployment.database
        victim, _ = cloud.workers(2)
        body = {"tasks": pages.tasks(PAGES), "max_inflight": 40}
        job_id = client.post("/v1/jobs", json=body).json()["job_id"]
        until("work in hand", lambda: len(pages.request_counts) > PAGES // 8 or None)
        victim.send_signal(signal.SIGKILL)
        cloud.workers(1)
        until("more work", lambda: len(pages.request_counts) > PAGES // 4 or None)
        database.kill()
        database.start()
        until("work after the crash", lambda: len(pages.request_counts) > PAGES // 2 or None)
        run = until("the run to end", lambda: _ended(client, job_id))

        assert run["status"] == "completed"
        assert run_of(client, job_id)["stats"]["successful"] == PAGES
        assert max(pages.request_counts.values()) <= 3
        assert trio.run(execute, database.url, _COUNTED) == [(PAGES,) * 5]
        kinds = ("Task", "Stats", "Event", "Crossing")
        assert [rows_of(cloud, kind) for kind in kinds] == [[], [], [], []]
        assert len(rows_of(cloud, "Run")) == 1


def test_check_of_a_worker_covers_both_stores(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with mixed_deployment(request, tmp_path) as deployment:
        checked = deployment.cloud.run("check", "--role", "worker")

    assert "database" in checked
    assert "table" in checked
