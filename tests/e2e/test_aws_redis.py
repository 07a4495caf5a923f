"""Redis is killed in the middle of a run and comes back empty: the run goes on, under its cap."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.aws_audit import violations
from tests.e2e.cloud import Cloud, Process, a_client, a_cloud, ended_run, run_of
from tests.e2e.pages import some_pages
from tests.e2e.programs import until
from tests.servers import a_redis, free_port

pytestmark = pytest.mark.slow

CAP, PAGES = 12, 1_800
AWAY, BACK = "coordinator unavailable", "coordinator available again"


def test_a_run_goes_on_without_redis_and_when_it_is_back(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    port = free_port()
    with ExitStack() as redis, some_pages(think_s=0.2) as pages:
        url = redis.enter_context(a_redis(tmp_path / "redis-1", port))
        with a_cloud(request, tmp_path, redis=url) as cloud, a_client(cloud.api()) as client:
            workers = cloud.workers(2)
            body = {"tasks": pages.tasks(PAGES), "max_inflight": CAP}
            job_id = client.post("/v1/jobs", json=body).json()["job_id"]
            # At 60 a second. By then the workers know of each other: they look every 10 s.
            until("work with Redis", lambda: pages.asked.total() >= 800 or None)
            redis.close()
            until("it to be missed", lambda: _all_say(cloud, workers, AWAY))
            # Fetches that were under way at the outage count on top for a moment and are allowed.
            requests_before = pages.asked.total()
            until(
                "older pages to end",
                lambda: pages.asked.total() >= requests_before + 3 * CAP or None,
            )
            pages.inflight_max = 0
            until(
                "work without Redis", lambda: pages.asked.total() >= requests_before + 150 or None
            )
            away_max, was_live = pages.inflight_max, not run_of(client, job_id)["terminal"]
            redis.enter_context(a_redis(tmp_path / "redis-2", port))
            until("it to be found", lambda: _all_say(cloud, workers, BACK))
            run = until("the run to end", lambda: ended_run(client, job_id))

            assert was_live
            assert away_max <= CAP + len(workers)
            assert run["stats"]["successful"] == run["stats"]["total"] == PAGES
            assert violations(cloud) == []


def _all_say(cloud: Cloud, workers: list[Process], text: str) -> bool | None:
    return all(text in cloud.log_of(worker) for worker in workers) or None
