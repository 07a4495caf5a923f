"""Tests the AWS engine with several processes that start and stop in order."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cloud import Cloud, Process, a_client, aws_deployment, ended_run, run_of
from tests.e2e.programs import a_site, until
from tests.e2e.proxy_log import agents_in, counting_calls
from tests.e2e.test_stop import a_silent_site

pytestmark = pytest.mark.slow


@pytest.fixture(params=["with Redis", "without Redis"])
def cloud(request: pytest.FixtureRequest, redis: str, tmp_path: Path) -> Iterator[Cloud]:
    redis_url = redis if request.param == "with Redis" else None
    with aws_deployment(request, tmp_path, redis=redis_url) as cloud:
        yield cloud


def _metrics_of(cloud: Cloud, worker: Process) -> str:
    """Returns the URL of the worker's metrics, from its log."""
    match = re.search(r"(http://[^\s\"]+/metrics)", cloud.log_of(worker))
    assert match is not None, cloud.log_of(worker)
    return match.group(1)


def test_workers_in_other_processes_finish_a_job_and_end_on_sigterm(cloud: Cloud) -> None:
    first, again = cloud.run("init"), cloud.run("init")
    with a_site() as site, a_client(cloud.api()) as client:
        workers = cloud.workers(2)
        tasks = [{"url": url} for url in site.urls(120)]

        submitted = client.post("/v1/jobs", json={"tasks": tasks})
        assert submitted.status_code == 201, submitted.text
        job_id = submitted.json()["job_id"]
        run = until("the run to end", lambda: ended_run(client, job_id))
        lines = [
            httpx.get(_metrics_of(cloud, metrics_worker), trust_env=False).text
            for metrics_worker in workers
        ]
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(timeout=60) for worker in workers]

    assert first == again
    assert run["status"] == "completed"
    assert (run["stats"]["completed"], run["stats"]["total"]) == (120, 120)
    assert codes == [0, 0]
    assert all("conveyor_engine_calls_total{" in text for text in lines)


@pytest.mark.parametrize("cloud", ["with Redis"], indirect=True)
def test_a_worker_can_call_aws_through_the_sdk(cloud: Cloud) -> None:
    with (
        a_site() as site,
        counting_calls(cloud, agents_in) as (lean, agents_of_transport),
        counting_calls(cloud, agents_in) as (boto, agents_of_sdk),
        a_client(cloud.api(**lean)) as client,
    ):
        cloud.workers(1, CONVEYOR_AWS_PLANE="boto", **boto)
        tasks = [{"url": url} for url in site.urls(20)]

        job_id = client.post("/v1/jobs", json={"tasks": tasks}).json()["job_id"]
        run = until("the run to end", lambda: ended_run(client, job_id))

    assert (run["stats"]["completed"], run["stats"]["total"]) == (20, 20)
    assert set(agents_of_transport) == set()
    assert set(agents_of_sdk) == {"aiobotocore"}


@pytest.mark.parametrize("cloud", ["without Redis"], indirect=True)
def test_an_api_ends_on_sigterm_and_another_serves_its_job(cloud: Cloud) -> None:
    first = cloud.start("api", CONVEYOR_DRAIN_S="0")
    with a_client(cloud.url_of(first)) as client:
        tasks = [{"url": "https://example.com/"}]
        job_id = client.post("/v1/jobs", json={"tasks": tasks}).json()["job_id"]
        first.send_signal(signal.SIGTERM)
        code = first.wait(timeout=30)
    with a_client(cloud.api()) as client:
        seen = run_of(client, job_id)

    assert code == 0
    assert seen["stats"]["total"] == 1


@pytest.mark.parametrize("cloud", ["with Redis"], indirect=True)
def test_a_stop_reaches_workers_in_other_processes_at_once(cloud: Cloud) -> None:
    with a_silent_site() as port, a_client(cloud.api()) as client:
        cloud.workers(2)
        tasks = [{"url": f"http://127.0.0.1:{port}/{number}"} for number in range(40)]
        job_id = client.post("/v1/jobs", json={"tasks": tasks}).json()["job_id"]
        until("work in flight", lambda: run_of(client, job_id)["stats"]["inflight"] == 40 or None)

        stopped = client.post(f"/v1/jobs/{job_id}/stop").json()

    assert stopped["receipt"]["leases"] == 0
    assert stopped["receipt"]["released"] >= 40
    assert stopped["status"] == "stopped"
