"""Audits: rows against counters, and bodies against what their tasks say."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain.changes import ANY, Change, Delete, StatsKey, TaskKey, Update
from conveyor.domain.ids import JobId, RunId
from tests.api.world import World


async def a_job(world: World) -> tuple[str, str]:
    """Three tasks: two pages, one failure."""
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    good, bad, other = await world.tasks_of(job_id, run_id)
    await world.succeed(job_id, good)
    await world.fail(job_id, bad)
    await world.succeed(job_id, other)
    return job_id, run_id


async def audit(world: World, job_id: str, run_id: str) -> Any:
    seen = await world.get(f"/v1/jobs/{job_id}/runs/{run_id}/audit")
    assert seen.status == 200
    return seen.json


async def test_a_sound_run_passes(world: World) -> None:
    job_id, run_id = await a_job(world)

    seen = await audit(world, job_id, run_id)

    assert (seen["ok"], seen["live"], seen["differences"], seen["bad_bodies"]) == (
        True,
        False,
        [],
        [],
    )
    assert seen["bodies_checked"] == 2
    counted = {name: seen["counts"][name] for name in ("admitted", "successful", "failed")}
    assert counted == {"admitted": 3, "successful": 2, "failed": 1}
    assert (seen["counts"]["bad_target"], seen["counts"]["credits"]) == (1, 2)


async def test_an_inherited_result_is_on_the_bill_of_its_own_run(world: World) -> None:
    job_id, _ = await a_job(world)
    again = (await world.post(f"/v1/jobs/{job_id}/rerun?status=failed")).json
    run_id = again["latest_run"]["run_id"]
    for task in await world.tasks_of(job_id, run_id):
        if task.source_run_id is None:
            await world.succeed(job_id, task)

    seen = await audit(world, job_id, run_id)

    assert seen["ok"]
    assert (seen["counts"]["successful"], seen["counts"]["credits"]) == (3, 1)


@pytest.mark.parametrize("name", ["admitted", "done", "successful", "bad_target", "credits"])
@pytest.mark.parametrize("by", [1, -1])
async def test_a_counter_that_is_off_is_named(world: World, name: str, by: int) -> None:
    job_id, run_id = await a_job(world)
    key = StatsKey(JobId(job_id), RunId(run_id), 0)
    before = (await audit(world, job_id, run_id))["counts"][name]
    await world.env.commit(Change((Update(key, ANY, deltas={name: by}),)))

    seen = await audit(world, job_id, run_id)

    assert not seen["ok"]
    assert seen["differences"] == [{"what": name, "recorded": before + by, "counted": before}]


async def test_a_row_that_is_gone_is_noticed(world: World) -> None:
    job_id, run_id = await a_job(world)
    task = (await world.tasks_of(job_id, run_id))[1]
    key = TaskKey(JobId(job_id), RunId(run_id), task.task_id, task.shard)
    await world.env.commit(Change((Delete(key),)))

    seen = await audit(world, job_id, run_id)

    named = {difference["what"] for difference in seen["differences"]}
    assert {"admitted", "done", "failed", "bad_target", "total"} <= named


async def test_bodies_that_are_gone_or_changed_are_named(world: World) -> None:
    job_id, run_id = await a_job(world)
    rows = [row for row in await world.tasks_of(job_id, run_id) if row.result]
    first, second = rows
    assert first.result is not None
    assert second.result is not None
    await world.env.blobs.put(second.result.key, [b"something else"])
    changed = await audit(world, job_id, run_id)
    await world.env.blobs.delete_prefix(f"jobs/{job_id}")

    gone = await audit(world, job_id, run_id)

    assert changed["bad_bodies"] == [{"task_id": second.task_id, "problem": "damaged"}]
    assert not changed["ok"]
    assert {bad_body["problem"] for bad_body in gone["bad_bodies"]} == {"missing"}
    assert len(gone["bad_bodies"]) == 2


async def test_a_live_run_passes_while_it_moves(world: World) -> None:
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    task, *_ = await world.tasks_of(job_id, run_id)
    await world.succeed(job_id, task)
    await world.claim(job_id, (await world.tasks_of(job_id, run_id))[1])

    seen = await audit(world, job_id, run_id)

    assert (seen["ok"], seen["live"]) == (True, True)
