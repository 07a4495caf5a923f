"""The feed: what happened to a caller's jobs, in order, whoever did it."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain import limits
from conveyor.domain.ids import RunId
from conveyor.usecases.run import ingest, reconcile
from tests.api.world import ANNA, BERT, World


async def types_of(world: World, path: str = "/v1/events", key: str = ANNA) -> list[str]:
    seen = await world.get(path, key=key)
    assert seen.status == 200
    return [event["type"] for event in seen.json["events"]]


async def test_a_feed_tells_of_a_job_from_its_submission_to_its_deletion(world: World) -> None:
    job = await world.submit(1, status="open", external_id="mine")
    path = f"/v1/jobs/{job['job_id']}"
    await world.post(f"{path}/pause")
    await world.post(f"{path}/pause")
    await world.post(f"{path}/resume")
    await world.post(f"{path}/close")
    await world.finish(job)
    await world.post(f"{path}/rerun")
    await world.post(f"{path}/stop")

    seen = (await world.get("/v1/events")).json

    assert [event["type"] for event in seen["events"]] == [
        "job.created",
        "run.created",
        "run.paused",
        "run.resumed",
        "job.closed",
        "run.completed",
        "run.created",
        "run.stopped",
    ]
    assert [event["id"] for event in seen["events"]] == [str(n) for n in range(1, 9)]
    assert seen["last_id"] == "8"
    created, completed = seen["events"][0], seen["events"][5]
    assert created["data"] == {"job_id": job["job_id"], "external_id": "mine"}
    assert completed["data"]["stats"]["successful"] == 1
    assert completed["data"]["run_id"] == job["latest_run"]["run_id"]


async def test_the_end_of_an_ingest_is_told(world: World) -> None:
    job = await world.submit(limits.SYNC_TASKS_MAX)
    run_id = RunId(job["latest_run"]["run_id"])
    run = await world.run(job["job_id"], run_id)
    for batch in await ingest.open_batches_of(world.env, run.job_id, run_id):
        await reconcile.finish_batch(world.env, batch)

    (*_, last_event) = (await world.get("/v1/events")).json["events"]

    assert (last_event["type"], last_event["data"]["tasks"]) == (
        "ingest.done",
        limits.SYNC_TASKS_MAX,
    )


async def test_a_feed_is_read_page_by_page_and_behind_a_place(world: World) -> None:
    await world.submit()
    await world.submit()

    first = (await world.get("/v1/events?limit=3")).json
    rest = (await world.get(f"/v1/events?limit=3&after={first['last_id']}")).json
    end = (await world.get(f"/v1/events?after={rest['last_id']}")).json

    assert [event["id"] for event in first["events"] + rest["events"]] == ["1", "2", "3", "4"]
    assert end == {"events": [], "last_id": "4"}
    assert (await world.get("/v1/events?after=latest")).json == {"events": [], "last_id": "4"}


async def test_callers_hear_of_their_own_jobs_only(world: World) -> None:
    await world.submit(key=ANNA)
    theirs = await world.submit(key=BERT)

    seen = (await world.get("/v1/events", key=BERT)).json["events"]

    assert {event["data"]["job_id"] for event in seen} == {theirs["job_id"]}
    assert [event["id"] for event in seen] == ["1", "2"]


async def test_a_deleted_job_leaves_only_the_news_of_its_deletion(world: World) -> None:
    job = await world.submit(1, external_id="secret-name")
    other = await world.submit(1)
    await world.call("DELETE", f"/v1/jobs/{job['job_id']}")
    await reconcile.delete_due(world.env)

    seen = await world.get("/v1/events")

    events = [(event["type"], event["data"]) for event in seen.json["events"]]
    assert ("job.deleted", {"job_id": job["job_id"]}) in events
    assert [kind for kind, data in events if data["job_id"] == other["job_id"]] == [
        "job.created",
        "run.created",
    ]
    assert len(events) == 3
    assert b"secret-name" not in seen.body


async def test_a_deleted_run_is_told_of_and_leaves_nothing_else(world: World) -> None:
    job = await world.submit(1)
    await world.finish(job)
    run_id = job["latest_run"]["run_id"]
    await world.call("DELETE", f"/v1/jobs/{job['job_id']}/runs/{run_id}")
    await reconcile.delete_due(world.env)

    assert await types_of(world) == ["job.created", "run.deleted"]


@pytest.mark.parametrize("after", ["", "x", "-1", "1.5", "9" * 16, "%D9%A3"])
async def test_a_place_that_is_none_is_refused(world: World, after: str) -> None:
    seen = await world.get(f"/v1/events?after={after}")

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, "/after")


async def test_a_retried_submit_is_told_once(world: World) -> None:
    body: Any = {"tasks": [{"url": "https://example.com/"}]}
    for _ in range(2):
        await world.post("/v1/jobs", body, headers={"Idempotency-Key": "k"})

    assert await types_of(world) == ["job.created", "run.created"]
