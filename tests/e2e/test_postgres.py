"""Tests a deployment on Postgres with an API and two workers. Processes and the database server are
killed under load: no task is lost, and none is counted twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trio

from tests.conformance.coordinators import a_space
from tests.e2e.cloud import a_client, run_of
from tests.e2e.pages import Pages, some_pages
from tests.e2e.postgres import Deployment, postgres_deployment
from tests.e2e.postgres_audit import leases_count, violations
from tests.e2e.programs import until
from tests.postgres import execute
from tests.servers import ACCESS_KEY, SECRET_KEY, a_replica

pytestmark = pytest.mark.slow

PAGES = 1_200
_RELOAD = "SELECT pg_reload_conf()"


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with postgres_deployment(tmp_path) as deployment:
        yield deployment


def _submit(client: httpx.Client, pages: Pages, count: int) -> str:
    body = {"tasks": pages.tasks(count), "max_inflight": 40}
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job_id"])


def _ended(client: httpx.Client, job_id: str) -> dict[str, object] | None:
    """Returns the run when it has ended. The API answers 503 while the database is down."""
    answer = client.get(f"/v1/jobs/{job_id}")
    if answer.status_code == 503:
        return None
    run: dict[str, object] = answer.json()["latest_run"]
    return run if run["terminal"] else None


def test_a_killed_worker_and_a_killed_database_server_lose_no_task(deployment: Deployment) -> None:
    cloud = deployment.cloud
    with some_pages(think_s=0.2) as pages, a_client(cloud.api()) as client:
        victim, _ = cloud.workers(2)
        job_id = _submit(client, pages, PAGES)
        until("work in hand", lambda: len(pages.request_counts) > PAGES // 8 or None)
        victim.send_signal(signal.SIGKILL)
        cloud.workers(1)
        until("more work", lambda: len(pages.request_counts) > PAGES // 4 or None)
        deployment.server.kill()
        deployment.server.start()
        until("work after the crash", lambda: len(pages.request_counts) > PAGES // 2 or None)
        run = until("the run to end", lambda: _ended(client, job_id))

        assert run["status"] == "completed"
        assert run_of(client, job_id)["stats"]["successful"] == PAGES
        assert max(pages.request_counts.values()) <= 3
        assert deployment.violations() == []


def test_a_run_continues_on_a_promoted_replica(tmp_path: Path) -> None:
    with postgres_deployment(tmp_path) as deployment, a_replica(deployment.server) as replica:
        primary, cloud = deployment.server, deployment.cloud
        for statement in ("ALTER SYSTEM SET synchronous_standby_names = '*'", _RELOAD):
            trio.run(execute, primary.url, statement)
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
        cloud.environ["CONVEYOR_DATABASE_URL"] = (
            f"postgresql://conveyor@{hosts}/postgres?target_session_attrs=read-write"
        )
        with some_pages(think_s=0.2) as pages, a_client(cloud.api()) as client:
            cloud.workers(2)
            job_id = _submit(client, pages, PAGES // 2)
            until("work in hand", lambda: len(pages.request_counts) > PAGES // 8 or None)
            primary.kill()
            # The replica inherited the setting; without a standby its commits would wait for ever.
            trio.run(execute, replica.url, "SELECT pg_promote()")
            for statement in ("ALTER SYSTEM RESET synchronous_standby_names", _RELOAD):
                trio.run(execute, replica.url, statement)
            run = until("the run to end", lambda: _ended(client, job_id))

            assert run["status"] == "completed"
            assert run_of(client, job_id)["stats"]["successful"] == PAGES // 2
            assert violations(replica.url, deployment.blob_dir) == []


def test_ps_lists_the_workers_and_check_passes(deployment: Deployment) -> None:
    cloud = deployment.cloud
    with some_pages() as pages, a_client(cloud.api()) as client:
        cloud.workers(2)
        job_id = _submit(client, pages, 50)

        until("the run to end", lambda: _ended(client, job_id))

        until("both workers", lambda: cloud.run("ps", "--json").count('"capacity"') >= 2 or None)
        assert "database" in cloud.run("check", "--role", "worker")


def test_a_stop_ends_the_fetches_of_another_process_before_it_answers(
    deployment: Deployment,
) -> None:
    cloud = deployment.cloud
    with some_pages(think_s=30.0) as pages, a_client(cloud.api()) as client:
        cloud.workers(2)
        job_id = _submit(client, pages, 100)
        until("work in hand", lambda: pages.inflight_count >= 40 or None)

        run = client.post(f"/v1/jobs/{job_id}/stop").json()

        assert run["receipt"]["complete"] is True
        assert leases_count(deployment.server.url, run["run_id"]) == 0
        assert run_of(client, job_id)["status"] == "stopped"
        pages.think_s = 0.0


def test_bodies_can_be_in_a_bucket(tmp_path: Path, seaweed: str) -> None:
    bucket = {
        "CONVEYOR_BLOB_DIR": "",
        "CONVEYOR_BUCKET": a_space(),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": seaweed,
    }
    with (
        postgres_deployment(tmp_path, "fsync=off", environ_more=bucket) as deployment,
        some_pages() as pages,
        a_client(deployment.cloud.api()) as client,
    ):
        deployment.cloud.workers(1)
        job_id = _submit(client, pages, 30)
        until("the run to end", lambda: _ended(client, job_id))

        run_id = run_of(client, job_id)["run_id"]
        page = client.get(f"/v1/jobs/{job_id}/runs/{run_id}/results").json()
        urls = [result["result_url"] for result in page["results"]]
        statuses = [client.get(url, follow_redirects=True).status_code for url in urls]

    assert statuses == [200] * 30
