"""Tests a rolling deployment, a scale-in and a Spot interruption during a run."""

from __future__ import annotations

from typing import Any

import httpx

from conveyor.cli.demo import Site, is_flaky, is_missing
from conveyor.domain import limits
from tests.deploy.containers.stage import Stage, until

PAGES, INFLIGHT = 1_500, 20


def test_replacing_and_removing_workers_during_a_run_loses_no_task(
    stage: Stage, url: str, site: Site
) -> None:
    headers = {"X-API-Key": stage.key}
    site.request_counts.clear()
    expected = {n: 2 if is_flaky(n) else 1 for n in range(PAGES) if not is_missing(n)}

    def count_refetches() -> int:
        """Returns how many more requests than needed the site has received."""
        return sum(max(0, site.request_counts[n] - count) for n, count in expected.items())

    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        tasks = [{"url": page_url} for page_url in site.urls(PAGES)]
        job_id = client.post("/v1/jobs", json={"tasks": tasks, "max_inflight": INFLIGHT}).json()[
            "job_id"
        ]

        def run() -> dict[str, Any]:
            latest_run: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()["latest_run"]
            return latest_run

        def reaches(share: float) -> None:
            until(f"{share:.0%} of the pages", lambda: run()["stats"]["completed"] >= share * PAGES)

        reaches(0.1)
        old = stage.of_role("worker")
        # A rolling deployment: a new worker is ready before an old one stops.
        for container in old:
            stage.start("worker")
            container.stop()
        reaches(0.5)
        # Scale-in: one of two workers stops and is not replaced.
        scaled_in, left = [item for item in stage.of_role("worker") if item not in old]
        scaled_in.stop()
        reaches(0.6)
        drained = count_refetches()
        # Spot: a worker is killed during its fetches, without time to drain.
        stage.start("worker")
        left.kill()
        ended = until("the run to end", lambda: (latest_run := run())["terminal"] and latest_run)
        audit = client.get(f"/v1/jobs/{job_id}/runs/{ended['run_id']}/audit").json()

    stats = ended["stats"]
    lost, double = PAGES - stats["completed"], stats["completed"] - PAGES
    refetched = f"refetched {drained} after draining, {count_refetches()} with those of the kill"
    print(f"pages {PAGES}, lost {lost}, double {max(0, double)}, {refetched}")
    assert (stats["completed"], stats["total"]) == (PAGES, PAGES)
    assert audit["ok"] is True
    # A draining worker finishes its fetches. A killed one also loses the pages that wait for a
    # pack: at most twice as many as its slots (docs/decisions/0027-packs-on-s3.md).
    assert drained <= INFLIGHT
    assert count_refetches() <= drained + INFLIGHT + 2 * limits.CONCURRENCY
