"""Over a cache: who looks may be shown counts of a moment ago, who changes anything is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.api.world import World
from tests.conformance.caches import a_modelled_cache


@pytest.fixture
def cached(world: World) -> World:
    cache = a_modelled_cache(world.clock)
    return world.seen_through(replace(world.env, cache=cache))


def count_done(run: Any) -> int:
    done: int = run["stats"]["completed"]
    return done


async def shown(world: World, job_id: str, run_id: str) -> set[int]:
    """What every way to look at the run shows."""
    paths = [f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/runs/{run_id}"]
    job, run = [(await world.get(path)).json for path in paths]
    jobs = (await world.get("/v1/jobs")).json["jobs"]
    runs = (await world.get(f"/v1/jobs/{job_id}/runs")).json["runs"]
    return {
        count_done(run_view)
        for run_view in (job["latest_run"], run, jobs[0]["latest_run"], runs[0])
    }


async def test_all_who_look_are_shown_the_same_for_a_second(cached: World) -> None:
    job = await cached.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    first, second, last = await cached.tasks_of(job_id, run_id)
    await cached.succeed(job_id, first)

    seen = [await shown(cached, job_id, run_id)]
    await cached.succeed(job_id, second)
    seen.append(await shown(cached, job_id, run_id))
    cached.clock.advance(1.0)
    seen.append(await shown(cached, job_id, run_id))
    await cached.succeed(job_id, last)
    seen.append(await shown(cached, job_id, run_id))

    assert seen == [{1}, {1}, {2}, {3}]


@pytest.mark.parametrize("verb", ["pause", "resume", "stop"])
async def test_who_changes_a_run_is_shown_it_as_it_is_and_nobody_less_from_then_on(
    cached: World, verb: str
) -> None:
    """To resume what is not paused changes nothing, and is answered all the same."""
    job = await cached.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    first, *_ = await cached.tasks_of(job_id, run_id)
    before = await shown(cached, job_id, run_id)
    await cached.succeed(job_id, first)

    answer = (await cached.post(f"/v1/jobs/{job_id}/{verb}")).json

    assert before == {0}
    assert count_done(answer) == 1
    assert await shown(cached, job_id, run_id) == {1}


async def test_who_adds_a_list_sees_its_lines_at_once(cached: World) -> None:
    job = await cached.submit(2, status="open")
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    await shown(cached, job_id, run_id)

    added = await cached.post(
        f"/v1/jobs/{job_id}/tasks", {"tasks": [{"url": "https://example.com/more"}]}
    )

    assert added.status in {200, 201, 202}
    run = (await cached.get(f"/v1/jobs/{job_id}/runs/{run_id}")).json
    assert (run["stats"]["total"], run["stats"]["pending"], run["status"]) == (3, 3, "running")


async def test_a_deleted_job_is_not_found_at_once(cached: World) -> None:
    job = await cached.submit(2)
    job_id = job["job_id"]
    await shown(cached, job_id, job["latest_run"]["run_id"])

    await cached.call("DELETE", f"/v1/jobs/{job_id}")

    assert (await cached.get(f"/v1/jobs/{job_id}")).status == 404
