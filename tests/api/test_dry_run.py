"""Dry runs: told what would happen, and nothing has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.world import World, make_world

SUBMIT = "/v1/jobs?dry_run=true"
LINES = [
    {"url": "https://example.com/"},
    {"url": "ftp://example.com/"},
    {"url": "http://127.0.0.1"},
]


async def test_a_dry_submit_counts_good_and_bad_lines_and_creates_nothing(world: World) -> None:
    seen = await world.post(SUBMIT, {"tasks": LINES})

    assert seen.status == 200
    assert (seen.json["valid_tasks"], seen.json["invalid_tasks_count"]) == (1, 2)
    assert seen.json["invalid_reasons"] == {"unsupported_scheme": 1, "forbidden_target": 1}
    assert [bad["index"] for bad in seen.json["invalid_tasks"]] == [1, 2]
    assert seen.json["would_answer"] == 400
    assert (await world.get("/v1/jobs")).json["jobs"] == []
    assert (await world.get("/v1/events")).json["events"] == []


@pytest.mark.parametrize(("count", "status"), [(3, 201), (30, 202)])
async def test_a_dry_submit_foresees_the_answer_of_the_real_one(count: int, status: int) -> None:
    world = make_world(sync_tasks_max=20)
    body = {"tasks": [{"url": f"https://example.com/{n}"} for n in range(count)]}

    dry = await world.post(SUBMIT, body)
    real = await world.post("/v1/jobs", body)

    assert dry.json["would_answer"] == real.status == status
    assert dry.json["valid_tasks"] == real.json["accepted_tasks"]


async def test_a_dry_run_uses_up_no_idempotency_key(world: World) -> None:
    body = {"tasks": LINES[:1]}
    headers = {"Idempotency-Key": "k"}

    for _ in range(2):
        assert (await world.post(SUBMIT, body, headers=headers)).status == 200

    assert (await world.post("/v1/jobs", body, headers=headers)).status == 201


@pytest.mark.parametrize("body", [{"tasks": []}, {"tasks": LINES, "bogus": 1}, {}])
async def test_a_dry_submit_refuses_what_is_wrong_with_the_request_itself(
    world: World, body: Any
) -> None:
    assert (await world.post(SUBMIT, body)).status == 400


async def test_dry_run_is_true_or_false(world: World) -> None:
    seen = await world.post("/v1/jobs?dry_run=yes", {"tasks": LINES[:1]})
    real = await world.post("/v1/jobs?dry_run=false", {"tasks": LINES[:1]})

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, "/dry_run")
    assert real.status == 201


PRICES = [
    ({}, (1, 1)),
    ({"js_render": "true"}, (5, 5)),
    ({"premium_proxy": True}, (10, 10)),
    ({"js_render": True, "premium_proxy": True}, (25, 25)),
    ({"mode": "auto"}, (1, 25)),
    ({"js_render": "false"}, (1, 1)),
]


@pytest.mark.parametrize(("params", "price"), PRICES)
async def test_the_price_of_a_gateway_is_told_page_by_page(
    params: dict[str, Any], price: tuple[int, int]
) -> None:
    world = make_world(targets=None)
    lines: list[Any] = [{"url": "https://a.example/", "zenrows_params": params}] * 2
    plain = {"url": "https://b.example/"}

    estimate = (await world.post(SUBMIT, {"tasks": [*lines, plain]})).json["estimate"]

    least, most = price
    assert estimate == {"credits_min": 2 * least + 1, "credits_max": 2 * most + 1}


async def test_what_we_fetch_ourselves_costs_nothing(world: World) -> None:
    seen = await world.post(SUBMIT, {"tasks": LINES[:1], "zenrows_params": {"mode": "auto"}})

    assert seen.json["estimate"] == {"credits_min": 0, "credits_max": 0}


@pytest.mark.parametrize("query", ["", "&status=failed", "&reason=bad_target", "&host=example.com"])
async def test_a_dry_rerun_foresees_what_the_real_one_does(query: str) -> None:
    world = make_world(targets=None)
    job = await world.submit(3)
    job_id = job["job_id"]
    good, bad, other = await world.tasks_of(job_id, job["latest_run"]["run_id"])
    await world.succeed(job_id, good)
    await world.fail(job_id, bad)
    await world.succeed(job_id, other)

    dry = await world.post(f"/v1/jobs/{job_id}/rerun?dry_run=true{query}")
    runs = (await world.get(f"/v1/jobs/{job_id}/runs")).json["runs"]
    real = await world.post(f"/v1/jobs/{job_id}/rerun?{query.removeprefix('&')}")

    assert (dry.status, len(runs)) == (200, 1)
    for field in ("rerun_of", "retried_tasks", "inherited_tasks"):
        assert dry.json[field] == real.json[field]
    assert dry.json["would_answer"] == real.status
    assert dry.json["estimate"]["credits_max"] == real.json["retried_tasks"]


@pytest.mark.parametrize("query", ["status=pending", "reason=blocked", "host=other.example"])
async def test_a_dry_rerun_of_nothing_is_refused_as_the_real_one_is(
    world: World, query: str
) -> None:
    job = await world.submit(1)
    await world.finish(job)

    path = f"/v1/jobs/{job['job_id']}/rerun?{query}"
    for seen in (await world.post(f"{path}&dry_run=true"), await world.post(path)):
        assert (seen.status, seen.code) == (409, "no_matching_tasks")


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("reason=", "/reason"),
        ("reason=bogus", "/reason"),
        ("reason=blocked,", "/reason"),
        ("host=", "/host"),
        ("host=a.example,", "/host"),
        ("host=a.example:80", "/host"),
        ("host=a.example/x", "/host"),
        ("host=u@a.example", "/host"),
        ("host=" + ",".join(f"h{n}.example" for n in range(101)), "/host"),
    ],
)
async def test_a_filter_that_is_none_is_refused(world: World, query: str, pointer: str) -> None:
    job = await world.submit(1)
    await world.finish(job)

    seen = await world.post(f"/v1/jobs/{job['job_id']}/rerun?{query}")

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, pointer)


async def test_hosts_are_compared_as_the_parser_writes_them(world: World) -> None:
    body = {"tasks": [{"url": "https://Bücher.example/x"}, {"url": "http://[2606:4700::1]/"}]}
    job = (await world.post("/v1/jobs", body)).json
    await world.finish(job)
    path = f"/v1/jobs/{job['job_id']}/rerun?dry_run=true&host="

    for host in ("B%C3%9CCHER.example", "xn--bcher-kva.example", "[2606:4700:0::1]"):
        seen = await world.post(path + host)
        assert (seen.status, seen.json.get("retried_tasks")) == (200, 1), host
