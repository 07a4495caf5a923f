"""Jobs: every route answers as the contract says, and says no in its words."""

from __future__ import annotations

import pytest

from conveyor.domain.submit.scraper_params import DIRECT_SUPPORT
from tests.api.world import World, make_world


async def test_a_small_job_is_created_with_its_rows_in_place(world: World) -> None:
    seen = await world.post(
        "/v1/jobs",
        {
            "tasks": [{"url": "https://example.com/a", "external_id": "a", "metadata": {"k": "v"}}],
            "name": "Prices",
            "external_id": "job-1",
            "metadata": {"team": "x"},
            "zenrows_params": {"js_render": True, "wait": 5, "custom_headers": {"Referer": "r"}},
            "webhook": {"url": "https://hooks.example.com/in"},
            "max_inflight": 7,
            "max_attempts": 2,
            "priority": 3,
        },
    )

    assert seen.status == 201
    assert seen.json["accepted_tasks"] == 1
    assert seen.json["status"] == "closed"
    assert seen.json["webhook"] == {"url": "https://hooks.example.com/in", "signature": False}
    run = seen.json["latest_run"]
    assert run["status"] == "running"
    assert run["terminal"] is False
    assert run["trigger"] == "manual"
    assert run["stats"] == {
        "total": 1,
        "completed": 0,
        "successful": 0,
        "failed": 0,
        "inflight": 0,
        "retrying": 0,
        "pending": 1,
        "spend": {"credits": 0, "cost": 0.0},
    }
    assert "pause_state" not in run
    assert "ingest_status" not in run
    assert len(await world.tasks_of(seen.json["job_id"], run["run_id"])) == 1


async def test_a_job_shows_what_it_was_given_but_not_its_headers(world: World) -> None:
    job = await world.submit(
        2,
        name="Prices",
        metadata={"team": "x"},
        zenrows_params={"autoparse": True, "custom_headers": {"Authorization": "secret"}},
        max_inflight=7,
    )

    body = (await world.get(f"/v1/jobs/{job['job_id']}")).json

    assert body["name"] == "Prices"
    assert body["metadata"] == {"team": "x"}
    assert body["zenrows_params"] == {"autoparse": "true", "custom_headers": "***"}
    assert body["format"] == "json"
    assert body["type"] == "regular"
    assert body["max_inflight"] == 7
    assert body["latest_run"]["stats"]["total"] == 2
    assert body["created_at"] == "2023-11-14T22:13:20.000Z"
    assert "external_id" not in body


async def test_a_large_job_is_accepted_and_ingested_later() -> None:
    world = make_world(sync_tasks_max=5)

    seen = await world.post("/v1/jobs", {"tasks": [{"url": "https://example.com/"}] * 5})

    assert seen.status == 202
    assert seen.json["accepted_tasks"] == 5
    assert seen.json["latest_run"]["ingest_status"] == "pending"
    assert seen.json["latest_run"]["stats"]["total"] == 5
    assert seen.json["latest_run"]["stats"]["pending"] == 5


async def test_bad_lines_are_named_by_their_index_and_nothing_is_created(world: World) -> None:
    seen = await world.post(
        "/v1/jobs",
        {
            "tasks": [
                {"url": "https://example.com/"},
                {"url": "ftp://example.com/"},
                {},
                {"url": 5},
                {"url": "https://example.com/", "zenrows_params": {"nope": 1}},
                {"url": "https://example.com/", "external_id": "a b"},
                {"url": "https://example.com/", "metadata": {"k": 1}},
                {"url": "http://127.0.0.1/"},
                {"url": "https://example.com/", "method": "PUT"},
                {"url": "https://example.com/", "body": {"a": 1}},
            ]
        },
    )

    assert seen.status == 400
    assert seen.code == "invalid_argument"
    assert [(bad["index"], bad["reason"]) for bad in seen.json["invalid_tasks"]] == [
        (1, "unsupported_scheme"),
        (2, "malformed_url"),
        (3, "malformed_url"),
        (4, "unknown_param"),
        (5, "invalid_external_id"),
        (6, "metadata_too_large"),
        (7, "forbidden_target"),
        (8, "unsupported_method"),
        (9, "body_not_allowed"),
    ]
    assert (await world.get("/v1/jobs")).json == {"jobs": [], "next_cursor": None}


async def test_a_post_task_keeps_its_body_to_itself(world: World) -> None:
    lines = [{"url": "https://example.com/", "method": "post", "body": {"secret": [1, "x"]}}]
    job = (await world.post("/v1/jobs", {"tasks": lines})).json

    seen = await world.get(f"/v1/jobs/{job['job_id']}/results")

    assert seen.json["results"][0]["method"] == "POST"
    assert b"secret" not in seen.body


@pytest.mark.parametrize(
    ("fields", "status", "code", "pointer"),
    [
        ({"type": "scheduled"}, 400, "invalid_argument", "/schedule"),
        ({"file_input_id": "x"}, 400, "invalid_argument", "/file_input_id"),
        (
            {"file_input_id": "x", "tasks": None, "status": "open"},
            409,
            "file_input_unsupported_for_job_type",
            None,
        ),
        ({"on_invalid": "ignore"}, 400, "invalid_argument", "/on_invalid"),
        ({"tasks": []}, 400, "invalid_argument", "/tasks"),
        ({"tasks": None}, 400, "invalid_argument", "/tasks"),
        ({"tasks": ["https://example.com"]}, 400, "invalid_argument", "/tasks/0"),
        ({"tasks": [{"url": "https://a.com", "x": 1}]}, 400, "invalid_argument", "/tasks/0/x"),
        ({"surprise": 1}, 400, "invalid_argument", "/surprise"),
        ({"a/b~c": 1}, 400, "invalid_argument", "/a~1b~0c"),
        ({"type": "other"}, 400, "invalid_argument", "/type"),
        ({"status": "deleted"}, 400, "invalid_argument", "/status"),
        ({"name": "x" * 101}, 400, "invalid_argument", "/name"),
        ({"name": 5}, 400, "invalid_argument", "/name"),
        ({"external_id": "a b"}, 400, "invalid_argument", "/external_id"),
        ({"external_id": "ab\n"}, 400, "invalid_argument", "/external_id"),
        ({"external_id": ""}, 400, "invalid_argument", "/external_id"),
        ({"metadata": {"k": 1}}, 400, "metadata_too_large", "/metadata"),
        ({"metadata": {"": "v"}}, 400, "metadata_key_invalid", "/metadata"),
        ({"metadata": []}, 400, "invalid_argument", "/metadata"),
        ({"max_inflight": 0}, 400, "invalid_argument", "/max_inflight"),
        ({"max_inflight": -1}, 400, "invalid_argument", "/max_inflight"),
        ({"max_inflight": 10**30}, 400, "invalid_argument", "/max_inflight"),
        ({"max_inflight": "9"}, 400, "invalid_argument", "/max_inflight"),
        ({"max_inflight": 1.5}, 400, "invalid_argument", "/max_inflight"),
        ({"max_inflight": True}, 400, "invalid_argument", "/max_inflight"),
        ({"max_attempts": 10**9}, 400, "invalid_argument", "/max_attempts"),
        ({"max_attempts": 0}, 400, "invalid_argument", "/max_attempts"),
        ({"priority": 0}, 400, "invalid_argument", "/priority"),
        ({"priority": 11}, 400, "invalid_argument", "/priority"),
        ({"zenrows_params": {"nope": 1}}, 400, "invalid_argument", "/zenrows_params/nope"),
        ({"zenrows_params": {"wait": 1.5}}, 400, "invalid_argument", "/zenrows_params/wait"),
        ({"zenrows_params": {"wait": []}}, 400, "invalid_argument", "/zenrows_params/wait"),
        ({"zenrows_params": []}, 400, "invalid_argument", "/zenrows_params"),
    ],
)
async def test_a_field_that_is_wrong_is_pointed_at(
    world: World, fields: dict[str, object], status: int, code: str, pointer: str | None
) -> None:
    seen = await world.post("/v1/jobs", {"tasks": [{"url": "https://example.com/"}], **fields})

    assert (seen.status, seen.code) == (status, code)
    if pointer is not None:
        assert seen.json["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nB: c"},
        {"X\n": "a"},
        {"Transfer-Encoding": "chunked"},
        {"Connection": "close"},
        {"Host": "x"},
        {"content-length": "1"},
        {"Proxy-Authorization": "x"},
        {f"X-{number}": "v" for number in range(33)},
        {"X": "v" * 9000},
        {"X": 5},
    ],
)
async def test_headers_that_could_be_smuggled_are_refused(
    world: World, headers: dict[str, object]
) -> None:
    seen = await world.post(
        "/v1/jobs",
        {
            "tasks": [{"url": "https://example.com/"}],
            "zenrows_params": {"custom_headers": headers},
        },
    )

    assert seen.status == 400
    assert seen.json["errors"][0]["pointer"] == "/zenrows_params/custom_headers"


@pytest.mark.parametrize(
    ("webhook", "code"),
    [
        ({"url": "http://hooks.example.com/"}, "callback_url_must_be_https"),
        ({"url": "https://127.0.0.1/"}, "callback_url_must_be_https"),
        ({"url": "https://localhost/"}, "callback_url_must_be_https"),
        ({"url": "https://a@example.com/"}, "callback_url_must_be_https"),
        ({"url": "nonsense"}, "callback_url_must_be_https"),
        ({"url": ""}, "callback_url_must_be_https"),
        (
            {"url": "https://hooks.example.com/", "signature": True},
            "webhook_signing_requires_active_key",
        ),
        ({"signature": False}, "invalid_argument"),
        ({"url": "https://hooks.example.com/", "extra": 1}, "invalid_argument"),
    ],
)
async def test_a_webhook_must_be_a_public_https_url(
    world: World, webhook: dict[str, object], code: str
) -> None:
    body = {"tasks": [{"url": "https://example.com/"}], "webhook": webhook}

    seen = await world.post("/v1/jobs", body)

    assert (seen.status, seen.code) == (400, code)


async def test_an_open_job_takes_lists_until_it_is_closed(world: World) -> None:
    job = (await world.post("/v1/jobs", {"status": "open"})).json
    path = f"/v1/jobs/{job['job_id']}"
    assert job["latest_run"]["status"] == "pending"

    added = await world.post(f"{path}/tasks", {"tasks": [{"url": "https://example.com/1"}]})
    assert added.status == 200
    assert added.json["accepted_tasks"] == 1
    assert added.json["job_status"] == "open"
    assert added.json["latest_run"]["status"] == "running"
    last = await world.post(
        f"{path}/tasks", {"tasks": [{"url": "https://example.com/2"}], "last_batch": True}
    )
    assert last.json["job_status"] == "closed"
    late = await world.post(f"{path}/tasks", {"tasks": [{"url": "https://example.com/3"}]})

    assert (late.status, late.code) == (409, "last_batch_received")
    assert (await world.get(path)).json["latest_run"]["stats"]["total"] == 2


async def test_adding_nothing_is_refused(world: World) -> None:
    job = (await world.post("/v1/jobs", {"status": "open"})).json

    seen = await world.post(f"/v1/jobs/{job['job_id']}/tasks", {"tasks": []})

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, "/tasks")


async def test_closing_twice_answers_the_same(world: World) -> None:
    job = (await world.post("/v1/jobs", {"status": "open"})).json

    first = await world.post(f"/v1/jobs/{job['job_id']}/close")
    again = await world.post(f"/v1/jobs/{job['job_id']}/close")

    assert first.status == again.status == 200
    assert first.json["status"] == again.json["status"] == "closed"
    assert again.json["latest_run"]["status"] == "completed"


async def test_a_deleted_job_is_gone_and_deleting_it_again_is_fine(world: World) -> None:
    job = await world.submit()
    path = f"/v1/jobs/{job['job_id']}"

    first = await world.call("DELETE", path)
    again = await world.call("DELETE", path)

    assert (first.status, first.body) == (202, b"")
    assert (again.status, again.body) == (202, b"")
    assert (await world.get(path)).status == 404
    assert (await world.get(f"{path}/results")).status == 404
    assert (await world.get("/v1/jobs")).json["jobs"] == []


async def test_a_rerun_starts_the_chosen_tasks_over_and_inherits_the_rest(world: World) -> None:
    job = await world.submit(3)
    job_id, first = job["job_id"], job["latest_run"]["run_id"]
    good, bad, other = await world.tasks_of(job_id, first)
    await world.succeed(job_id, good)
    await world.fail(job_id, bad)
    await world.succeed(job_id, other)

    seen = await world.post(f"/v1/jobs/{job_id}/rerun?status=failed")

    assert seen.status == 201
    assert seen.json["rerun_of"] == first
    assert (seen.json["retried_tasks"], seen.json["inherited_tasks"]) == (1, 2)
    assert seen.json["latest_run"]["run_sequence"] == 2
    results = (await world.get(f"/v1/jobs/{job_id}/results")).json["results"]
    by_index = sorted(results, key=lambda row: row["index"])
    assert [row["status"] for row in by_index] == ["successful", "pending", "successful"]
    assert [row.get("source_run_id") for row in by_index] == [first, None, first]


@pytest.mark.parametrize("status", ["", "bogus", "failed,", ",", "failed,bogus", "FAILED"])
async def test_a_rerun_of_unknown_statuses_is_refused(world: World, status: str) -> None:
    job = await world.submit()

    seen = await world.post(f"/v1/jobs/{job['job_id']}/rerun?status={status}")

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, "/status")


async def test_a_live_run_cannot_be_rerun(world: World) -> None:
    job = await world.submit()

    seen = await world.post(f"/v1/jobs/{job['job_id']}/rerun")

    assert (seen.status, seen.code) == (409, "run_not_terminal")


async def test_jobs_are_listed_newest_first_page_by_page(world: World) -> None:
    jobs = []
    for _ in range(5):
        jobs.append((await world.submit())["job_id"])
        world.clock.advance(1)

    first = (await world.get("/v1/jobs?limit=2")).json
    second = (await world.get(f"/v1/jobs?limit=2&cursor={first['next_cursor']}")).json
    third = (await world.get(f"/v1/jobs?limit=2&cursor={second['next_cursor']}")).json

    pages = [first, second, third]
    assert [job["job_id"] for page in pages for job in page["jobs"]] == jobs[::-1]
    assert third["next_cursor"] is None


async def test_jobs_are_filtered_by_status_and_type(world: World) -> None:
    closed = (await world.submit())["job_id"]
    opened = (await world.post("/v1/jobs", {"status": "open"})).json["job_id"]

    async def list_names(query: str) -> list[str]:
        return [job["job_id"] for job in (await world.get(f"/v1/jobs?{query}")).json["jobs"]]

    assert await list_names("status=open") == [opened]
    assert await list_names("status=closed") == [closed]
    assert await list_names("status=deleted") == []
    assert sorted(await list_names("type=regular")) == sorted([opened, closed])
    assert await list_names("type=scheduled") == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=101", "limit=-1", "limit=x", "limit=", "limit=1&limit=2", "limit=%D9%A1",
        "limit=1e1", "limit=" + "9" * 30, "status=x", "status=", "type=x",
    ],
)  # fmt: skip
async def test_a_bad_query_is_refused(world: World, query: str) -> None:
    seen = await world.get(f"/v1/jobs?{query}")

    assert (seen.status, seen.code) == (400, "invalid_argument")


@pytest.mark.parametrize("query", ["", "?dry_run=true"])
async def test_a_job_with_a_parameter_that_the_gateway_cannot_honour_is_refused(query: str) -> None:
    world = make_world(gateway=DIRECT_SUPPORT)
    job = {"tasks": [{"url": "https://example.com/"}], "zenrows_params": {"css_extractor": "{}"}}

    seen = await world.post(f"/v1/jobs{query}", job)

    assert (seen.status, seen.json["code"]) == (400, "invalid_argument")
    assert seen.json["errors"][0]["pointer"] == "/zenrows_params/css_extractor"
    assert "CONVEYOR_GATEWAY_URL" in seen.json["detail"]


async def test_a_line_with_a_parameter_that_the_gateway_cannot_honour_is_invalid() -> None:
    world = make_world(gateway=DIRECT_SUPPORT)
    bad = {"url": "https://example.com/", "zenrows_params": {"js_render": True}}
    tasks = [{"url": "https://example.com/"}, bad]
    invalid = [{"index": 1, "reason": "unsupported_param", "value": "js_render"}]

    refused = await world.post("/v1/jobs", {"tasks": tasks})
    foretold = await world.post("/v1/jobs?dry_run=true", {"tasks": tasks, "on_invalid": "skip"})
    skipped = await world.post("/v1/jobs", {"tasks": tasks, "on_invalid": "skip"})

    assert (refused.status, refused.json["invalid_tasks"]) == (400, invalid)
    assert foretold.json["invalid_tasks"] == invalid
    assert skipped.status == 201
