"""Tests a deployment whose connections to AWS and Redis go through faulty proxies."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from conveyor.domain import limits
from tests.chaos.proxy import ROUGH, Proxy, running_proxy
from tests.e2e.cloud import a_client, aws_deployment, ended_run
from tests.e2e.programs import a_site, until

pytestmark = pytest.mark.slow

PAGES = 100
BEHIND = {
    "AWS_ENDPOINT_URL_DYNAMODB": "DynamoDB",
    "AWS_ENDPOINT_URL_SQS": "SQS",
    "AWS_ENDPOINT_URL_S3": "S3",
    "CONVEYOR_REDIS_URL": "Redis",
}


def test_every_task_ends_once_over_a_faulty_network(
    request: pytest.FixtureRequest, redis: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cloud = stack.enter_context(aws_deployment(request, tmp_path, redis=redis))
        # Each body is an object, so that S3 gets enough calls for faults.
        cloud.environ["CONVEYOR_PACK_WAIT_MS"] = "0"
        proxies: dict[str, Proxy] = {}
        for number, (name, server) in enumerate(BEHIND.items()):
            proxy = proxies[server] = stack.enter_context(
                running_proxy(cloud.environ[name], number)
            )
            cloud.environ[name] = proxy.address
        site = stack.enter_context(a_site())
        client = stack.enter_context(a_client(cloud.api()))
        cloud.workers(2)
        for proxy in proxies.values():
            proxy.rates = ROUGH
        tasks = [{"url": url} for url in site.urls(PAGES)]

        def submit_once() -> str | None:
            key = {"Idempotency-Key": "the same"}
            answer = client.post("/v1/jobs", json={"tasks": tasks}, headers=key)
            assert answer.status_code in {201, 202, 409, 503}, answer.text
            return str(answer.json()["job_id"]) if answer.is_success else None

        # An interrupted request may not release its key; the claim on the key then expires.
        job_id = until(
            "the job", submit_once, deadline_s=2 * limits.IDEMPOTENCY_CLAIM_S, every_s=1.0
        )
        until("half", lambda: _count_completed(client, job_id) > PAGES // 2 or None, deadline_s=200)
        for proxy in proxies.values():
            proxy.rates = {}
        until(
            "all of it", lambda: _count_completed(client, job_id) == PAGES or None, deadline_s=200
        )
        run = until("the end", lambda: ended_run(client, job_id), deadline_s=200)
        audit = client.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit").json()
        jobs = client.get("/v1/jobs").json()["jobs"]

    fired = sum((proxy.fired for proxy in proxies.values()), Counter[str]())
    assert {"late", "cut", "swallowed"} <= set(fired), fired
    assert all(proxy.fired for proxy in proxies.values())
    assert len(jobs) == 1
    assert run["status"] == "completed"
    assert run["stats"]["total"] == run["stats"]["completed"] == PAGES
    assert audit["ok"], audit


def _count_completed(client: httpx.Client, job_id: str) -> int:
    answer = client.get(f"/v1/jobs/{job_id}")
    return int(answer.json()["latest_run"]["stats"]["completed"]) if answer.is_success else 0
