"""Workers of the AWS engine are killed, stopped and suspended: no task is lost, and none is counted
twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.aws_audit import leases_of, violations
from tests.e2e.cloud import Cloud, a_client, aws_deployment, ended_run
from tests.e2e.pages import some_pages
from tests.e2e.programs import until

pytestmark = pytest.mark.slow

CAP = 30
PAGES = 1_000


@pytest.fixture
def cloud(request: pytest.FixtureRequest, redis: str, tmp_path: Path) -> Iterator[Cloud]:
    with aws_deployment(request, tmp_path, redis=redis) as cloud:
        yield cloud


@dataclass(slots=True)
class Aftermath:
    """What was observed of a run that lost two of its three workers."""

    killed_leases_back_s: float
    run: dict[str, Any]
    later_run: dict[str, Any]
    refetched: int
    fetched_max: int
    problems: list[str]
    sleeper_lives: bool


@pytest.fixture(scope="module")
def aftermath(
    request: pytest.FixtureRequest, redis: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Aftermath]:
    """Runs one scenario for several tests, because it takes a claim's lifetime of 90 s."""
    folder = tmp_path_factory.mktemp("workers")
    with aws_deployment(request, folder, redis=redis) as cloud, some_pages() as pages:
        url = cloud.api()
        victim, sleeper, _survivor = cloud.workers(3, CONVEYOR_CONCURRENCY=str(CAP // 3))
        with a_client(url) as client:
            body = {"tasks": pages.tasks(PAGES), "max_inflight": CAP}
            job_id = client.post("/v1/jobs", json=body).json()["job_id"]
            pages.think_s = 2.0
            # More pages than two of the three workers have in flight.
            until("work in hand", lambda: pages.inflight_count >= CAP - 5 or None)
            victim.send_signal(signal.SIGKILL)
            sleeper.send_signal(signal.SIGSTOP)
            killed_at, held = time.monotonic(), leases_of(cloud, job_id)
            # The survivor renews only its own leases, which are at most a third.
            until("leases", lambda: len(held & leases_of(cloud, job_id)) <= CAP // 3 or None)
            back_s = time.monotonic() - killed_at
            pages.think_s = 0.05
            run = until("the run to end", lambda: ended_run(client, job_id), deadline_s=200)
            sleeper.send_signal(signal.SIGCONT)
            body = {"tasks": pages.tasks(200, start=PAGES)}
            later_id = client.post("/v1/jobs", json=body).json()["job_id"]
            later = until("a later run to end", lambda: ended_run(client, later_id))
        yield Aftermath(
            killed_leases_back_s=back_s,
            run=run,
            later_run=later,
            refetched=sum(count - 1 for count in pages.request_counts.values()),
            fetched_max=max(pages.request_counts.values()),
            problems=violations(cloud),
            sleeper_lives=sleeper.poll() is None,
        )


def test_a_killed_worker_loses_no_task_and_no_task_counts_twice(aftermath: Aftermath) -> None:
    stats = aftermath.run["stats"]

    assert aftermath.run["status"] == "completed"
    assert (stats["successful"], stats["completed"], stats["total"]) == (PAGES,) * 3
    assert aftermath.problems == []


def test_the_leases_of_a_killed_worker_expire_within_40_seconds(aftermath: Aftermath) -> None:
    assert aftermath.killed_leases_back_s < 40


def test_only_tasks_in_flight_in_a_lost_worker_are_fetched_again(aftermath: Aftermath) -> None:
    assert aftermath.refetched <= CAP
    assert aftermath.fetched_max == 2


def test_a_worker_suspended_beyond_its_claims_settles_none_and_continues(
    aftermath: Aftermath,
) -> None:
    stats = aftermath.later_run["stats"]

    assert aftermath.sleeper_lives
    assert (stats["successful"], stats["total"]) == (200, 200)
    assert aftermath.problems == []


def test_a_worker_finishes_its_fetches_after_sigterm(cloud: Cloud) -> None:
    with some_pages(think_s=3.0) as pages, a_client(cloud.api()) as client:
        (worker,) = cloud.workers(1, CONVEYOR_DRAIN_S="30")
        body = {"tasks": pages.tasks(60), "max_inflight": 20}
        job_id = client.post("/v1/jobs", json=body).json()["job_id"]
        until("work in hand", lambda: pages.inflight_count == 20 or None)

        worker.send_signal(signal.SIGTERM)
        code = worker.wait(timeout=40)
        left, started_pages = leases_of(cloud, job_id), set(pages.request_counts)
        done = client.get(f"/v1/jobs/{job_id}").json()["latest_run"]["stats"]["completed"]
        pages.think_s = 0.05
        cloud.workers(1)
        run = until("the run to end", lambda: ended_run(client, job_id))

    assert (code, left, done) == (0, set(), len(started_pages))
    assert run["stats"]["successful"] == 60
    assert set(pages.request_counts.values()) == {1}
    assert violations(cloud) == []


def test_a_worker_hands_back_fetches_that_exceed_its_drain_time(cloud: Cloud) -> None:
    with some_pages(think_s=300.0) as pages, a_client(cloud.api()) as client:
        (worker,) = cloud.workers(1, CONVEYOR_DRAIN_S="1")
        job_id = client.post("/v1/jobs", json={"tasks": pages.tasks(40)}).json()["job_id"]
        until("work in hand", lambda: pages.inflight_count == 40 or None)

        asked_at = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(timeout=110)
        left = leases_of(cloud, job_id)
        pages.think_s = 0.05
        cloud.workers(1)
        # Before visibility timeouts or claims could expire.
        run = until("the run to end", lambda: ended_run(client, job_id), deadline_s=50)
        seconds = time.monotonic() - asked_at

    assert (code, left) == (0, set())
    assert seconds < 60
    assert run["stats"]["successful"] == 40
    assert violations(cloud) == []
