"""Jobs are found by the state of their latest run and by name; no filter crosses callers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.world import BERT, World


async def names(world: World, query: str, **options: Any) -> list[str]:
    seen = await world.get(f"/v1/jobs?{query}", **options)
    assert seen.status == 200, seen.body
    return [job["name"] for job in seen.json["jobs"]]


async def three_jobs(world: World) -> None:
    """One has ended well, one with a failure, and one is live."""
    await world.finish(await world.submit(1, name="Ended well"))
    failed = await world.submit(1, name="Ended badly")
    (task,) = await world.tasks_of(failed["job_id"], failed["latest_run"]["run_id"])
    await world.fail(failed["job_id"], task)
    await world.submit(1, name="Alive")
    await world.submit(1, key=BERT, name="Alive elsewhere")


@pytest.mark.parametrize(
    ("query", "job_names"),
    [
        ("run_status=running", ["Alive"]),
        ("run_status=running,pending", ["Alive"]),
        ("run_status=completed", ["Ended badly", "Ended well"]),
        ("run_status=running,completed", ["Alive", "Ended badly", "Ended well"]),
        ("run_status=stopped", []),
        ("with_failures=true", ["Ended badly"]),
        ("name=ended", ["Ended badly", "Ended well"]),
        ("name=ended&with_failures=true", ["Ended badly"]),
        ("name=alive&run_status=running", ["Alive"]),
    ],
)
async def test_jobs_are_filtered_by_their_latest_run_and_their_name(
    world: World, query: str, job_names: list[str]
) -> None:
    await three_jobs(world)

    assert await names(world, query) == job_names


@pytest.mark.parametrize("query", ["name=job", "run_status=running", "run_status=pending,running"])
async def test_pages_of_a_filtered_list_show_each_job_once(world: World, query: str) -> None:
    for number in range(5):
        await world.submit(1, name=f"job {number}")
    job_names: list[str] = []
    cursor = ""

    while True:
        seen = (await world.get(f"/v1/jobs?{query}&limit=2{cursor}")).json
        job_names += [job["name"] for job in seen["jobs"]]
        if seen["next_cursor"] is None:
            break
        cursor = f"&cursor={seen['next_cursor']}"

    assert job_names == [f"job {number}" for number in (4, 3, 2, 1, 0)]


async def test_a_cursor_is_valid_for_its_own_filter_only(world: World) -> None:
    for _ in range(3):
        await world.submit(1, name="job")
    cursor = (await world.get("/v1/jobs?name=job&limit=1")).json["next_cursor"]

    assert (await world.get(f"/v1/jobs?name=other&cursor={cursor}")).code == "invalid_cursor"


async def test_an_unknown_status_is_refused(world: World) -> None:
    assert (await world.get("/v1/jobs?run_status=deleted")).status == 400


async def test_host_limits_are_replaced_and_removed(world: World) -> None:
    job = (await world.submit(1))["job_id"]

    seen = await world.call("PUT", f"/v1/jobs/{job}/host_limits", {"concurrency": 2})
    removed = await world.call("DELETE", f"/v1/jobs/{job}/host_limits")

    assert seen.json["host_limits"] == {"concurrency": 2}
    assert "host_limits" not in removed.json


async def test_nobody_changes_the_host_limits_of_another_caller(world: World) -> None:
    job = (await world.submit(1))["job_id"]

    seen = await world.call("PUT", f"/v1/jobs/{job}/host_limits", {"concurrency": 2}, key=BERT)

    assert seen.status == 404
