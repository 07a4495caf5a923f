"""What a caller is told about a run that waits."""

from __future__ import annotations

from typing import Any

from conveyor.domain import limits
from conveyor.domain.ids import RunId
from conveyor.domain.run.wait_reason import RunReport, WaitReason, WorkerReport
from conveyor.usecases.run import run_progress
from tests.api.world import World


async def shown(world: World, job: Any) -> Any:
    return (await world.get(f"/v1/jobs/{job['job_id']}")).json["latest_run"]


async def test_a_run_that_nobody_works_on_says_so_everywhere(world: World) -> None:
    job = await world.submit(2)
    expected = {"reason": "no_workers", "detail": "no worker is running"}

    listed = (await world.get("/v1/jobs")).json["jobs"][0]["latest_run"]
    runs = (await world.get(f"/v1/jobs/{job['job_id']}/runs")).json["runs"]

    assert job["latest_run"]["waiting_on"] == expected
    assert listed["waiting_on"] == runs[0]["waiting_on"] == expected
    assert "eta_seconds" not in listed


async def test_what_another_process_saw_is_shown_until_it_is_too_old(world: World) -> None:
    job = await world.submit(100, max_inflight=4)
    run = await world.run(job["job_id"], job["latest_run"]["run_id"])
    sighting = RunReport(WaitReason.JOB_CAP, world.clock.now(), rate=0.3)
    await run_progress.publish_presence(world.env, WorkerReport(50, 4))
    await run_progress.publish_reports(world.env, {RunId(run.run_id): sighting})
    await world.env.coordinator.acquire(
        run.job_id, run.run_id, count_max=9, cap=4, ttl_s=limits.LEASE_TTL_S
    )

    seen = await shown(world, job)
    world.clock.advance(limits.STATUS_TTL_S + 1)
    later = await shown(world, job)

    assert seen["waiting_on"] == {
        "reason": "job_cap",
        "detail": "4 of 4 in flight",
        "since": "2023-11-14T22:13:20.000Z",
    }
    assert seen["eta_seconds"] == 334
    assert later["waiting_on"]["reason"] == "no_workers"
    assert "eta_seconds" not in later


async def test_an_ended_run_waits_for_nothing(world: World) -> None:
    job = await world.submit(1)
    await world.finish(job)

    run = await shown(world, job)

    assert "waiting_on" not in run
    assert "eta_seconds" not in run
