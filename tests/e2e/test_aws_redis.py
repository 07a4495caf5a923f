"""Tests that a run stays under its cap while Redis is killed and comes back empty."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.aws_audit import violations
from tests.e2e.cloud import Cloud, Process, a_client, aws_deployment, ended_run, run_of
from tests.e2e.pages import some_pages
from tests.e2e.programs import until
from tests.servers import a_redis, free_port

pytestmark = pytest.mark.slow

CAP, PAGES = 12, 1_800
UNAVAILABLE, AVAILABLE = "coordinator unavailable", "coordinator available again"


def test_a_run_continues_without_redis_and_after_its_return(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    port = free_port()
    with ExitStack() as redis, some_pages(think_s=0.2) as pages:
        url = redis.enter_context(a_redis(tmp_path / "redis-1", port))
        with aws_deployment(request, tmp_path, redis=url) as cloud, a_client(cloud.api()) as client:
            workers = cloud.workers(2)
            body = {"tasks": pages.tasks(PAGES), "max_inflight": CAP}
            job_id = client.post("/v1/jobs", json=body).json()["job_id"]
            # At 60 pages a second; by then the workers have read each other's reports.
            until("work with Redis", lambda: pages.request_counts.total() >= 800 or None)
            redis.close()
            until("it to be missed", lambda: _all_logs_contain(cloud, workers, UNAVAILABLE))
            # Fetches that were in flight at the outage may exceed the cap for a moment.
            requests_before = pages.request_counts.total()
            until(
                "older pages to end",
                lambda: pages.request_counts.total() >= requests_before + 3 * CAP or None,
            )
            pages.inflight_max = 0
            until(
                "work without Redis",
                lambda: pages.request_counts.total() >= requests_before + 150 or None,
            )
            away_max, was_live = pages.inflight_max, not run_of(client, job_id)["terminal"]
            redis.enter_context(a_redis(tmp_path / "redis-2", port))
            until("it to be found", lambda: _all_logs_contain(cloud, workers, AVAILABLE))
            run = until("the run to end", lambda: ended_run(client, job_id))

            assert was_live
            assert away_max <= CAP + len(workers)
            assert run["stats"]["successful"] == run["stats"]["total"] == PAGES
            assert violations(cloud) == []


def _all_logs_contain(cloud: Cloud, workers: list[Process], text: str) -> bool | None:
    return all(text in cloud.log_of(worker) for worker in workers) or None
