"""A request with an unknown parameter or a duplicate key is refused and changes nothing."""

from __future__ import annotations

import json

import pytest

from conveyor.api.route import Access, Query
from conveyor.api.server.app import ROUTES
from tests.api.world import World

GOOD = '{"url":"https://example.com/"}'
LONG = "," + ",".join([GOOD] * 20_000)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"tasks":[],"tasks":[{GOOD}]}}',
        f'{{"tasks":[{GOOD}],"name":"a","name":"b"}}',
        '{"tasks":[{"url":"https://example.com/1","url":"https://example.com/2"}]}',
        f'{{"tasks":[{GOOD}],"metadata":{{"a":"1","a":"2"}}}}',
        '{"tasks":[{"url":"https://example.com/","metadata":{"a":"1","\\u0061":"2"}}]}',
        '{"tasks":[{"url":"https://example.com/","method":"POST","body":{"a":[{"b":1,"b":2}]}}]}',
        f'{{"tasks":[{GOOD}],"zenrows_params":{{"mode":"auto","mode":"auto"}}}}',
    ],
)
@pytest.mark.parametrize("more", ["", LONG], ids=["short", "long"])
async def test_a_key_that_is_named_twice_is_refused(world: World, body: str, more: str) -> None:
    raw = body.replace("}]", "}]".replace("]", more + "]"), 1).encode()

    refused = await world.call("POST", "/v1/jobs", raw=raw)

    assert (refused.status, refused.code) == (400, "malformed_json")
    assert "twice" in refused.json["detail"]
    assert (await world.call("GET", "/v1/jobs")).json["jobs"] == []


async def test_headers_given_as_json_text_name_each_header_once(world: World) -> None:
    task = {
        "url": "https://example.com/",
        "zenrows_params": {"custom_headers": '{"X-A":"1","X-A":"2"}'},
    }

    refused = await world.call("POST", "/v1/jobs", {"tasks": [task]})

    assert refused.status == 400
    assert refused.json["invalid_tasks"][0]["reason"] == "invalid_param_value"


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/jobs?dryrun=true", "dryrun"),
        ("GET", "/v1/jobs?Status=open", "Status"),
        ("GET", "/v1/jobs?limit=1&offset=5", "offset"),
        ("GET", "/healthz?x", "x"),
    ],
)
async def test_a_parameter_that_a_route_does_not_have_is_refused_by_name(
    world: World, method: str, path: str, name: str
) -> None:
    body = {"tasks": [json.loads(GOOD)]} if method == "POST" else None

    refused = await world.call(method, path, body)

    assert (refused.status, refused.code) == (400, "invalid_argument")
    assert name in refused.json["detail"]
    assert refused.json["errors"][0]["pointer"] == f"/{name}"


async def test_a_misspelt_filter_reruns_nothing(world: World) -> None:
    job = await world.submit(2)
    await world.call("POST", f"/v1/jobs/{job['job_id']}/stop")

    refused = await world.call("POST", f"/v1/jobs/{job['job_id']}/rerun?statuses=failed")

    runs = await world.call("GET", f"/v1/jobs/{job['job_id']}/runs")
    assert refused.status == 400
    assert len(runs.json["runs"]) == 1


async def test_no_route_takes_a_parameter_that_it_does_not_name(world: World) -> None:
    names = ("job_id", "run_id", "input_id", "event_id", "export_id", "crawl_id", "content_id")
    ids = dict.fromkeys(names, "0" * 26)
    readable = [route for route in ROUTES if isinstance(route.does, Query)]

    for route in readable:
        path = route.path.format(**ids, task_id="x", file="x")
        key = None if route.access is Access.PUBLIC else "anna-key"
        refused = await world.call("GET", f"{path}?misspelt=1", key=key)

        assert (route.name, refused.status) == (route.name, 400)


async def test_a_parameter_that_is_given_twice_is_refused(world: World) -> None:
    for path in ("/v1/jobs?limit=1&limit=1", "/v1/events?after=latest&after=latest"):
        assert (await world.call("GET", path)).status == 400


async def test_jobs_are_listed_by_their_external_id(world: World) -> None:
    for name in ("a", "b", "a"):
        await world.submit(1, external_id=name)

    first = (await world.call("GET", "/v1/jobs?external_id=a&limit=1")).json
    rest = (await world.call("GET", f"/v1/jobs?external_id=a&cursor={first['next_cursor']}")).json
    other = await world.call("GET", f"/v1/jobs?external_id=b&cursor={first['next_cursor']}")
    none = (await world.call("GET", "/v1/jobs?external_id=c")).json

    external_ids = [job["external_id"] for job in first["jobs"] + rest["jobs"]]
    assert external_ids == ["a", "a"]
    assert other.code == "invalid_cursor"
    assert none["jobs"] == []


@pytest.mark.parametrize("name", ["a\u0000b", "a\r\nb", "\u001b[2J", "a\u007f", "a\u2028b", "a\n"])
async def test_a_name_with_control_characters_is_refused(world: World, name: str) -> None:
    body = {"tasks": [{"url": "https://example.com/"}], "name": name}

    refused = await world.call("POST", "/v1/jobs", body)

    assert refused.status == 400
    assert "name" in refused.json["errors"][0]["pointer"]


@pytest.mark.parametrize(
    ("method", "operation"),
    [
        *(("POST", operation) for operation in ("rerun", "stop", "cancel", "close", "pause")),
        ("DELETE", ""),
    ],
)
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"status":"failed"}', "invalid_argument"),
        (b"[]", "invalid_argument"),
        (b"status=failed", "malformed_json"),
        (b'{"a":' * 5_000, "invalid_argument"),
        (b"\xff", "malformed_json"),
    ],
)
async def test_options_in_the_body_of_an_operation_without_options_are_refused(
    world: World, method: str, operation: str, raw: bytes, code: str
) -> None:
    job_id = (await world.call("POST", "/v1/jobs", {"tasks": [json.loads(GOOD)]})).json["job_id"]
    path = f"/v1/jobs/{job_id}/{operation}".rstrip("/")

    refused = await world.call(method, path, raw=raw)

    assert (refused.status, refused.code) == (400, code)
    job = (await world.call("GET", f"/v1/jobs/{job_id}")).json
    assert (job["latest_run"]["run_sequence"], job["latest_run"]["status"]) == (1, "running")


@pytest.mark.parametrize("raw", [b"", b" ", b"{}", b"null", b"{ }\n"])
async def test_an_empty_body_is_none(world: World, raw: bytes) -> None:
    job_id = (await world.call("POST", "/v1/jobs", {"tasks": [json.loads(GOOD)]})).json["job_id"]

    stopped = await world.call("POST", f"/v1/jobs/{job_id}/stop", raw=raw)

    assert stopped.status == 200
