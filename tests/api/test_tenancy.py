"""Tenancy: on every route, what is not yours answers exactly like what does not exist."""

from __future__ import annotations

import re

import pytest

from conveyor.api.route import Access
from conveyor.api.server.app import ROUTES
from tests.api.world import ANNA, BERT, World, make_world

UNKNOWN = "01JZZZZZZZZZZZZZZZZZZZZZZZ"
SAME_ID = {"X-Request-ID": "the-same"}
NAMED = [route for route in ROUTES if "{job_id}" in route.path]
BODIES = {
    "addTasks": {"tasks": [{"url": "https://example.com/"}]},
    "putJobWebhook": {"url": "https://example.com/", "signature": False},
    "updateJobSchedule": {"rate": {"every": 1, "unit": "day"}},
    "updateScheduleState": {"schedule_state": "paused"},
    "setJobBudget": {"credits": 1},
    "setJobHostLimits": {"concurrency": 1},
}


@pytest.mark.parametrize("route", NAMED, ids=lambda route: route.name)
async def test_a_foreign_id_answers_byte_for_byte_like_an_unknown_one(route: object) -> None:
    world = make_world()
    assert isinstance(route, type(NAMED[0]))
    job = await world.submit(1)
    (task,) = await world.finish(job)
    run_id = job["latest_run"]["run_id"]
    path = route.path.replace("{task_id}", task.task_id).replace("{event_id}", "0" * 26)
    path = route.path.replace("{task_id}", task.task_id).replace("{export_id}", UNKNOWN)
    foreign = path.replace("{job_id}", job["job_id"]).replace("{run_id}", run_id)
    unknown = path.replace("{job_id}", UNKNOWN).replace("{run_id}", UNKNOWN)
    body = BODIES.get(route.name)

    theirs = await world.call(route.method, foreign, body, key=BERT, headers=SAME_ID)
    nobodys = await world.call(route.method, unknown, body, key=BERT, headers=SAME_ID)

    assert theirs.status == nobodys.status == 404
    assert theirs.body == nobodys.body
    assert theirs.headers == nobodys.headers
    assert (await world.get(f"/v1/jobs/{job['job_id']}", key=ANNA)).status == 200


@pytest.mark.parametrize("route", [r for r in NAMED if "{run_id}" in r.path], ids=lambda r: r.name)
async def test_a_run_of_another_job_is_not_found_under_this_one(route: object) -> None:
    world = make_world()
    assert isinstance(route, type(NAMED[0]))
    mine, other = await world.submit(1), await world.submit(1)
    (task,) = await world.finish(other)
    path = route.path.replace("{job_id}", mine["job_id"]).replace("{task_id}", task.task_id)

    seen = await world.call(
        route.method, path.replace("{run_id}", other["latest_run"]["run_id"]), headers=SAME_ID
    )
    unknown = await world.call(route.method, path.replace("{run_id}", UNKNOWN), headers=SAME_ID)

    assert (seen.status, seen.body) == (unknown.status, unknown.body)
    assert seen.status == 404


@pytest.mark.parametrize(
    "route", [r for r in ROUTES if r.access is not Access.PUBLIC], ids=lambda r: r.name
)
async def test_every_route_asks_for_a_key(route: object) -> None:
    world = make_world()
    assert isinstance(route, type(NAMED[0]))
    path = re.sub(r"\{\w+\}", UNKNOWN, route.path)

    seen = await world.call(route.method, path, key=None)

    assert (seen.status, seen.code) == (401, "unauthenticated")


async def test_a_caller_lists_only_own_jobs(world: World) -> None:
    await world.submit(key=ANNA)
    mine = await world.submit(key=BERT)

    seen = await world.get("/v1/jobs", key=BERT)

    assert [job["job_id"] for job in seen.json["jobs"]] == [mine["job_id"]]


@pytest.mark.parametrize(
    "job_id",
    [
        "x", "J%23x%23TS0", "..", "%2e%2e", "%00", "a" * 1_000_000, UNKNOWN.lower(),
        UNKNOWN + "A", UNKNOWN[:-1], "8" + UNKNOWN[1:], UNKNOWN + "%0A", "%F0%9F%98%80", "%FF",
        UNKNOWN + "%23", "*", "Job%23" + UNKNOWN,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
async def test_an_id_of_the_wrong_shape_is_not_found(world: World, job_id: str) -> None:
    seen = await world.get(f"/v1/jobs/{job_id}")

    assert (seen.status, seen.code) == (404, "not_found")


@pytest.mark.parametrize(
    "key",
    ["", " ", "é", "a" * 257, "a\tb", "a b "],
    ids=["empty", "blank", "é", "long", "tab", "tail"],
)
async def test_a_key_of_the_wrong_shape_is_not_let_in(world: World, key: str) -> None:
    seen = await world.get("/v1/jobs", headers={"X-API-Key": key})

    assert (seen.status, seen.code) == (401, "unauthenticated")


async def test_two_keys_are_none(world: World) -> None:
    seen = await world.get("/v1/jobs", headers=[("X-API-Key", "a"), ("X-API-Key", "b")])

    assert seen.status == 401


@pytest.mark.parametrize("query", ["X-API-Key=anna-key", "apikey=anna-key", "api_key=anna-key"])
async def test_a_key_in_the_query_is_not_a_key(world: World, query: str) -> None:
    assert (await world.get(f"/v1/jobs?{query}", key=None)).status == 401


async def test_a_bearer_token_is_not_a_key(world: World) -> None:
    headers = {"Authorization": "Bearer anna-key"}

    assert (await world.get("/v1/jobs", key=None, headers=headers)).status == 401
