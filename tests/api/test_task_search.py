"""Tasks are found by reason, host and text, in list order on request; hosts have figures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.world import BERT, World


async def a_run(world: World) -> tuple[str, Any]:
    urls = [f"https://{host}/{page}" for host in ("a.example", "b.example") for page in ("X", "y")]
    seen = await world.post("/v1/jobs", {"tasks": [{"url": url} for url in urls]})
    submitted = seen.json
    rows = await world.tasks_of(submitted["job_id"], submitted["latest_run"]["run_id"])
    await world.succeed(submitted["job_id"], rows[0], b"12345")
    await world.fail(submitted["job_id"], rows[1])
    await world.claim(submitted["job_id"], rows[2])
    path = f"/v1/jobs/{submitted['job_id']}/runs/{submitted['latest_run']['run_id']}"
    return path, rows


@pytest.mark.parametrize(
    ("query", "indexes"),
    [
        ("reason=bad_target", {1}),
        ("reason=timeout", set()),
        ("host=a.example", {0, 1}),
        ("host=B.example&status=inflight", {2}),
        ("text=/x", {0, 2}),
        ("status=inflight", {2}),
        ("status=failed&host=b.example", set()),
    ],
)
async def test_results_are_filtered(world: World, query: str, indexes: set[int]) -> None:
    path, _ = await a_run(world)

    seen = (await world.get(f"{path}/results?{query}")).json

    assert {task["index"] for task in seen["results"]} == indexes
    assert seen["next_cursor"] is None


@pytest.mark.parametrize("order", ["id", "list"])
async def test_pages_of_filtered_results_show_each_task_once(world: World, order: str) -> None:
    path, _ = await a_run(world)
    indexes: list[int] = []
    cursor = ""

    while True:
        page = (await world.get(f"{path}/results?text=e&order={order}&limit=1{cursor}")).json
        indexes += [task["index"] for task in page["results"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"

    assert sorted(indexes) == [0, 1, 2, 3]
    assert indexes == [0, 1, 2, 3] or order == "id"


@pytest.mark.parametrize("query", ["reason=unknown", "order=random"])
async def test_an_unknown_filter_is_refused(world: World, query: str) -> None:
    path, _ = await a_run(world)

    assert (await world.get(f"{path}/results?{query}")).status == 400


async def test_a_task_in_flight_says_since_when(world: World) -> None:
    path, rows = await a_run(world)

    seen = (await world.get(f"{path}/tasks/{rows[2].task_id}")).json

    assert (seen["status"], seen["started_at"]) == ("processing", "2023-11-14T22:13:20.000Z")


async def test_hosts_have_their_counts_and_the_worst_is_first(world: World) -> None:
    path, _ = await a_run(world)

    seen = (await world.get(f"{path}/hosts")).json

    assert seen["complete"]
    assert [host_count["host"] for host_count in seen["hosts"]] == ["a.example", "b.example"]
    first, second = seen["hosts"]
    assert (first["total"], first["successful"], first["failed"]) == (2, 1, 1)
    assert (first["bytes"], first["failure_reasons"]) == (5, {"bad_target": 1})
    assert (second["inflight"], second["failed"]) == (1, 0)


async def test_no_filter_shows_another_callers_tasks(world: World) -> None:
    path, rows = await a_run(world)

    for query in ("/results?host=a.example", "/hosts", f"/tasks/{rows[0].task_id}"):
        assert (await world.get(f"{path}{query}", key=BERT)).status == 404
