"""Budgets, host limits and spend over HTTP: what may be asked for, and what is shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.world import World, make_world


async def test_a_job_shows_its_budget_and_a_run_what_is_left_of_it(world: World) -> None:
    job = await world.submit(1, budget={"credits": 1000})

    body = (await world.get(f"/v1/jobs/{job['job_id']}")).json

    assert job["latest_run"]["budget"] == {"credits": 1000, "left": 1000}
    assert body["budget"] == {"credits": 1000}


async def test_a_budget_in_money_is_given_as_text_and_kept_exactly(world: World) -> None:
    job = await world.submit(1, budget={"cost": "12.50"})

    body = (await world.get(f"/v1/jobs/{job['job_id']}")).json

    assert job["latest_run"]["budget"] == {"cost": 12.5, "left": 12.5}
    assert body["budget"] == {"cost": "12.500000"}


async def test_a_job_without_limits_shows_none(world: World) -> None:
    job = await world.submit(1)

    body = (await world.get(f"/v1/jobs/{job['job_id']}")).json

    assert "budget" not in job["latest_run"]
    assert {"budget", "host_limits"}.isdisjoint(body)


async def test_a_budget_is_changed_by_putting_another(world: World) -> None:
    job = await world.submit(1, budget={"credits": 10})

    seen = await world.call("PUT", f"/v1/jobs/{job['job_id']}/budget", {"credits": 25})

    assert seen.status == 200
    assert seen.json["budget"] == {"credits": 25}
    assert seen.json["latest_run"]["budget"] == {"credits": 25, "left": 25}


@pytest.mark.parametrize(
    ("budget", "status", "code"),
    [
        ({"credits": 1, "cost": "1"}, 400, "invalid_argument"),
        ({}, 400, "invalid_argument"),
        ({"cost": "5"}, 400, "invalid_argument"),
    ],
)
async def test_a_budget_that_does_not_fit_is_refused(
    world: World, budget: Any, status: int, code: str
) -> None:
    job = await world.submit(1, budget={"credits": 10})

    seen = await world.call("PUT", f"/v1/jobs/{job['job_id']}/budget", budget)

    assert (seen.status, seen.code) == (status, code)


async def test_a_run_without_a_budget_cannot_be_given_one(world: World) -> None:
    job = await world.submit(1)

    seen = await world.call("PUT", f"/v1/jobs/{job['job_id']}/budget", {"credits": 5})

    assert (seen.status, seen.code) == (409, "run_has_no_budget")


async def test_a_budget_in_money_is_refused_where_calls_have_no_price() -> None:
    world = make_world(knows_costs=False)

    seen = await world.post(
        "/v1/jobs", {"tasks": [{"url": "https://example.com/"}], "budget": {"cost": "1"}}
    )

    assert (seen.status, seen.code) == (400, "invalid_argument")


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"budget": {"credits": 0}}, "/budget/credits"),
        ({"budget": {"credits": 1.5}}, "/budget/credits"),
        ({"budget": {"cost": 12.5}}, "/budget/cost"),
        ({"budget": {"cost": "-1"}}, "/budget/cost"),
        ({"budget": {"cost": "0"}}, "/budget/cost"),
        ({"budget": {"cost": "1", "credits": 1}}, "/budget"),
        ({"budget": {"euros": 1}}, "/budget/euros"),
        ({"host_limits": {}}, "/host_limits"),
        ({"host_limits": {"concurrency": 0}}, "/host_limits/concurrency"),
        ({"host_limits": {"rate_per_s": 0}}, "/host_limits/rate_per_s"),
        ({"host_limits": {"rate_per_s": 1e-300}}, "/host_limits/rate_per_s"),
        ({"host_limits": {"hosts": {"a b": {"concurrency": 1}}}}, "/host_limits/hosts"),
        ({"host_limits": {"hosts": {"a.example/x": {}}}}, "/host_limits/hosts"),
    ],
)
async def test_a_limit_that_cannot_be_is_refused_with_a_pointer_to_it(
    world: World, fields: dict[str, Any], pointer: str
) -> None:
    seen = await world.post("/v1/jobs", {"tasks": [{"url": "https://example.com/"}], **fields})

    assert (seen.status, seen.code) == (400, "invalid_argument")
    assert [error["pointer"] for error in seen.json["errors"]] == [pointer]


async def test_host_limits_are_shown_as_they_hold(world: World) -> None:
    host_limits = {
        "concurrency": 2,
        "rate_per_s": 5.0,
        "hosts": {"SLOW.example": {"rate_per_s": 0.5}},
    }
    job = await world.submit(1, host_limits=host_limits)

    body = (await world.get(f"/v1/jobs/{job['job_id']}")).json

    assert body["host_limits"] == {**host_limits, "hosts": {"slow.example": {"rate_per_s": 0.5}}}


async def test_spend_adds_up_from_task_to_run(world: World) -> None:
    job = await world.submit(3)
    run_id = job["latest_run"]["run_id"]
    await world.finish(job)

    results = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]
    run = (await world.get(f"/v1/jobs/{job['job_id']}/runs/{run_id}")).json

    one = {"credits": 1, "cost": 0.0025}
    assert [result["spend"] for result in results] == [{"total": one, "last_attempt": one}] * 3
    assert run["stats"]["spend"] == {"credits": 3, "cost": 0.0075}


async def test_a_task_that_was_never_tried_has_no_spend(world: World) -> None:
    job = await world.submit(1)

    (result,) = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]

    assert "spend" not in result
