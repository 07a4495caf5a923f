"""A rolling deployment and a scale-in while a run is under way: nothing is lost or done twice."""

from __future__ import annotations

from typing import Any

import httpx

from conveyor.cli.demo import Site, is_flaky, is_missing
from tests.deploy.containers.stage import Stage, until

PAGES = 1_500


def test_workers_are_replaced_and_removed_during_a_run(stage: Stage, url: str, site: Site) -> None:
    headers = {"X-API-Key": stage.key}
    site.request_counts.clear()
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        tasks = [{"url": each} for each in site.urls(PAGES)]
        job_id = client.post("/v1/jobs", json={"tasks": tasks, "max_inflight": 20}).json()["job_id"]

        def run() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()["latest_run"]
            return found

        until("some work", lambda: run()["stats"]["completed"] > PAGES // 10)
        old = [each for each in stage.containers if "worker" in each.name]
        # A rolling deployment: a new worker is ready before an old one is stopped.
        for container in old:
            stage.start("worker")
            container.stop()
            assert "draining" not in container.text() or run()
        until("more work", lambda: run()["stats"]["completed"] > PAGES // 2)
        # Scale-in: one of two workers goes, and nothing replaces it.
        new = [each for each in stage.containers if "worker" in each.name and each not in old]
        new[0].stop()
        ended = until("the run to end", lambda: (found := run())["terminal"] and found)
        audit = client.get(f"/v1/jobs/{job_id}/runs/{ended['run_id']}/audit").json()

    expected = {n: 2 if is_flaky(n) else 1 for n in range(PAGES) if not is_missing(n)}
    refetched = sum(site.request_counts[n] - count for n, count in expected.items())
    stats = ended["stats"]
    print(f"pages {PAGES}, lost {PAGES - stats['completed']}, refetched {refetched}")
    assert (stats["completed"], stats["total"]) == (PAGES, PAGES)
    assert audit["ok"] is True
    # Draining workers finish what they fetch.
    assert refetched == 0
