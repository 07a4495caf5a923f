"""Long lists: staged while they arrive, refused like short ones, and never half there."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.schemas.requests import decode_submit, drafts_of
from conveyor.schemas.streaming_tasks import StreamingTaskParser
from tests.api.streaming import COUNT, a_world, keyed, lines, staged, walk
from tests.api.world import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return a_world(monkeypatch)


async def test_a_long_list_is_accepted_and_ingested_line_by_line(world: World) -> None:
    body = {"name": "many", "tasks": lines(external_id="x"), "metadata": {"tasks": "[1]"}}

    seen = await world.post("/v1/jobs", body)

    assert seen.status == 202
    job_id, run_id = seen.json["job_id"], seen.json["latest_run"]["run_id"]
    assert seen.json["accepted_tasks"] == COUNT
    assert seen.json["latest_run"]["ingest_status"] == "pending"
    await walk(world, job_id, run_id)
    rows = await world.tasks_of(job_id, run_id)
    assert [(row.index, row.url) for row in rows] == [
        (index, f"https://example.com/{index}") for index in range(COUNT)
    ]
    job = await world.get(f"/v1/jobs/{job_id}")
    assert job.json["name"] == "many"
    assert job.json["metadata"] == {"tasks": "[1]"}


async def test_a_list_of_few_long_lines_is_in_place_when_the_answer_comes(world: World) -> None:
    body = {"tasks": lines(20, metadata={"a": "b" * 100})}

    seen = await world.post("/v1/jobs", body)

    assert seen.status == 201
    rows = await world.tasks_of(seen.json["job_id"], seen.json["latest_run"]["run_id"])
    assert len(rows) == 20


async def test_bad_lines_are_named_and_nothing_is_left(world: World) -> None:
    tasks = lines()
    tasks[7]["url"] = "ftp://example.com"
    tasks[33]["url"] = "no url"

    seen = await world.post("/v1/jobs", {"tasks": tasks})

    assert seen.status == 400
    assert [invalid_task["index"] for invalid_task in seen.json["invalid_tasks"]] == [7, 33]
    assert "2 of 40" in seen.json["detail"]
    assert staged(world) == []


async def test_bad_lines_may_be_skipped(world: World) -> None:
    tasks = lines()
    tasks[7]["url"] = "ftp://example.com"

    seen = await world.post("/v1/jobs", {"tasks": tasks, "on_invalid": "skip"})

    job_id, run_id = seen.json["job_id"], seen.json["latest_run"]["run_id"]
    await walk(world, job_id, run_id)
    rows = await world.tasks_of(job_id, run_id)
    assert [row.index for row in rows if row.problem] == [7]
    assert len(rows) == COUNT


@pytest.mark.parametrize("on_invalid", ["reject", "skip"])
async def test_a_post_that_clashes_with_the_job_is_found_wherever_the_params_stand(
    world: World, on_invalid: str
) -> None:
    tasks = lines()
    tasks[3] |= {"method": "POST", "body": "a=b"}
    params = {"js_render": "true"}

    seen = await world.post(
        "/v1/jobs", {"tasks": tasks, "zenrows_params": params, "on_invalid": on_invalid}
    )

    assert seen.status == 400
    assert seen.json["invalid_tasks"] == [
        {"index": 3, "reason": "method_param_conflict", "value": "js_render"}
    ]


@pytest.mark.parametrize(
    ("change", "code", "pointer"),
    [
        ({"tasks": [*lines(), {"urk": "x"}]}, "invalid_argument", "/tasks/40/urk"),
        ({"tasks": [*lines(), 5]}, "invalid_argument", "/tasks/40"),
        ({"tasks": lines(), "nmae": "x"}, "invalid_argument", "/nmae"),
        ({"tasks": lines(), "priority": 99}, "invalid_argument", "/priority"),
        ({"tasks": lines(), "file_input_id": "x"}, "invalid_argument", "/file_input_id"),
    ],
)
async def test_what_is_wrong_is_pointed_at(
    world: World, change: dict[str, Any], code: str, pointer: str
) -> None:
    seen = await world.post("/v1/jobs", change)

    assert (seen.status, seen.code) == (400, code)
    assert seen.json["errors"][0]["pointer"] == pointer
    assert staged(world) == []


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({"tasks": lines()}).encode()[:-2],
        json.dumps({"tasks": lines()}).encode()[:-30],
        json.dumps({"tasks": lines()}).encode() + b"]",
        b'{"tasks":' + json.dumps(lines()).encode() + b',"tasks":[{"url":"https://a.b/"}]}',
        b'{"tasks":' + json.dumps(lines()).encode() + b',"tasks":null,"status":"open"}',
        json.dumps({"tasks": lines()}).encode().replace(b"example.com/39", b"example.com/\xff"),
    ],
)
async def test_what_is_no_json_leaves_nothing(world: World, raw: bytes) -> None:
    seen = await world.post("/v1/jobs", raw=raw)

    assert (seen.status, seen.code) == (400, "malformed_json")
    assert staged(world) == []


async def test_more_lines_than_a_list_may_have_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TASKS_MAX", COUNT - 1)

    seen = await world.post("/v1/jobs", {"tasks": lines()})

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, "/tasks")
    assert staged(world) == []


async def test_a_line_may_only_be_so_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LONG_BODY_LINE_BYTES_MAX", 400)
    tasks = [*lines(), {"url": "x" * 600_000}, *lines()]

    beside = await world.post("/v1/jobs", {"tasks": lines(), "name": "x" * 600_000})
    within = await world.post("/v1/jobs", {"tasks": tasks})

    assert [response.code for response in (beside, within)] == ["malformed_json"] * 2
    assert staged(world) == []


async def test_secrets_of_a_long_list_are_sealed_before_they_are_staged(world: World) -> None:
    body = {"tasks": lines(method="POST", body={"password": "hunter2"})}

    seen = await world.post("/v1/jobs", body)

    assert seen.status == 202
    (key,) = staged(world)
    stored = b"".join([piece async for piece in world.env.blobs.open(key)])
    assert b"hunter2" not in stored
    assert stored.count(b"\n") == COUNT


async def test_a_long_list_may_be_scheduled(world: World) -> None:
    schedule = {"rate": {"every": 1, "unit": "hour"}}
    body = {"type": "scheduled", "schedule": schedule, "tasks": lines()}

    seen = await world.post("/v1/jobs", body)

    assert (seen.status, seen.json["accepted_tasks"]) == (201, COUNT)
    assert len(staged(world)) == 1


async def test_a_long_list_is_added_to_an_open_job_and_ingested_after_the_answer(
    world: World,
) -> None:
    job = (await world.post("/v1/jobs", {"status": "open"})).json
    path = f"/v1/jobs/{job['job_id']}/tasks"

    seen = await world.post(path, {"tasks": lines(), "last_batch": True}, **keyed("k"))
    again = await world.post(path, {"tasks": lines(), "last_batch": True}, **keyed("k"))

    assert (seen.status, seen.json["accepted_tasks"]) == (200, COUNT)
    assert again.body == seen.body
    assert seen.json["job_status"] == "closed"
    run_id = seen.json["latest_run"]["run_id"]
    assert await world.tasks_of(job["job_id"], run_id) == []
    await walk(world, job["job_id"], run_id)
    assert len(await world.tasks_of(job["job_id"], run_id)) == COUNT


async def test_a_long_list_for_a_closed_job_is_refused_and_gone(world: World) -> None:
    job = await world.submit()

    seen = await world.post(f"/v1/jobs/{job['job_id']}/tasks", {"tasks": lines()})

    assert (seen.status, seen.code) == (409, "last_batch_received")
    assert staged(world) == []


async def test_a_long_body_without_a_line_is_as_good_as_a_short_one(world: World) -> None:
    metadata = {"a": "b" * 500}

    opened = await world.post("/v1/jobs", {"status": "open", "metadata": metadata, "tasks": []})
    closed = await world.post("/v1/jobs", {"metadata": metadata, "tasks": []})

    assert opened.status == 201
    assert (closed.status, closed.json["errors"][0]["pointer"]) == (400, "/tasks")
    assert staged(world) == []


async def test_a_dry_run_of_a_long_list_stages_nothing(world: World) -> None:
    seen = await world.post("/v1/jobs?dry_run=true", {"tasks": lines()})

    assert (seen.status, seen.json["valid_tasks"]) == (200, COUNT)
    assert staged(world) == []


async def test_a_gzip_body_is_the_same_request(world: World) -> None:
    raw = json.dumps({"tasks": lines()}).encode()
    headers = {"Idempotency-Key": "k", "Content-Encoding": "gzip"}

    plain = await world.post("/v1/jobs", raw=raw, **keyed("k"))
    zipped = await world.post("/v1/jobs", raw=gzip.compress(raw), headers=headers)

    assert (zipped.status, zipped.body) == (plain.status, plain.body) == (202, plain.body)


async def test_a_gzip_body_that_breaks_off_is_refused(world: World) -> None:
    raw = gzip.compress(json.dumps({"tasks": lines()}).encode())
    headers = {"Content-Encoding": "gzip"}

    short = await world.post("/v1/jobs", raw=raw[:-9], headers=headers)
    other = await world.post("/v1/jobs", raw=b"{}", headers=headers)

    assert [response.status for response in (short, other)] == [400, 400]
    assert staged(world) == []


@pytest.mark.parametrize("unit", [gzip.compress(b""), gzip.compress(b" ")], ids=["empty", "blank"])
async def test_gzip_members_that_hold_nothing_are_refused_early(world: World, unit: bytes) -> None:
    raw = unit * 50_000

    seen = await world.post("/v1/jobs", raw=raw, headers={"Content-Encoding": "gzip"})

    assert (seen.status, seen.code) == (400, "invalid_argument")
    assert "too many frames or members" in seen.json["detail"]


async def test_a_gzip_bomb_is_cut_off_at_the_cap(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_BYTES_MAX", 1_000_000)
    raw = gzip.compress(b'{"name":"' + b"x" * 5_000_000)

    seen = await world.post("/v1/jobs", raw=raw, headers={"Content-Encoding": "gzip"})

    assert (seen.status, seen.code) == (413, "request_too_large")


@given(st.data())
def test_lines_are_the_same_wherever_the_body_is_cut(data: st.DataObject) -> None:
    text = st.text('ab"\\{}[],:é\n', max_size=6)
    tasks = data.draw(
        st.lists(
            st.fixed_dictionaries(
                {"url": text}, optional={"metadata": st.dictionaries(text, text, max_size=2)}
            ),
            max_size=6,
        )
    )
    fields = data.draw(st.permutations([("tasks", tasks), ("name", 'x"tasks":['), ("priority", 2)]))
    raw = json.dumps(dict(fields), ensure_ascii=False, indent=data.draw(st.none() | st.just(1)))
    whole = raw.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)))

    body = StreamingTaskParser()
    drafts = [
        draft
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        for draft in body.feed(whole[start:end])
    ]

    request = decode_submit(whole)
    assert drafts == drafts_of(request.tasks or [])
    assert decode_submit(body.end()) == msgspec.structs.replace(request, tasks=[])
