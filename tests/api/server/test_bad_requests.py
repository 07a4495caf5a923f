"""Bad requests: whatever comes in, the answer is a problem, quick, and never our fault."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.api.server.app import ROUTES
from conveyor.domain import limits
from conveyor.schemas.requests import is_too_deep
from tests.api.world import World, make_world

TASKS = b'"tasks":[{"url":"https://example.com/"}]'
DEEP = limits.JSON_DEPTH_MAX


def _nest(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


MALFORMED = {
    "empty": b"",
    "not json": b"hello",
    "truncated": b'{"tasks":[{"url":"https://exa',
    "trailing": b"{" + TASKS + b"} x",
    "two documents": b"{" + TASKS + b"}{}",
    "NaN": b"{" + TASKS + b',"metadata":{"a":NaN}}',
    "Infinity": b"{" + TASKS + b',"metadata":{"a":-Infinity}}',
    "1e400": b"{" + TASKS + b',"metadata":{"a":1e400}}',
    "deep arrays": b"{"
    + TASKS
    + b',"metadata":{"a":'
    + _nest(200_000)
    + b"}}",  # Python 3.14 reads some ten thousand levels.
    "deep in a body": b'{"tasks":[{"url":"x","method":"POST","body":' + _nest(80) + b"}]}",
    "deep and open": b'{"tasks":[{"url":' + b"[" * 1_000_000,
    "BOM": b"\xef\xbb\xbf{" + TASKS + b"}",
    "UTF-16": ("{" + TASKS.decode() + "}").encode("utf-16"),
    "UTF-32": ("{" + TASKS.decode() + "}").encode("utf-32"),
    "lone surrogate": b"{" + TASKS + b',"name":"\\ud800"}',
    "lone low surrogate": b"{" + TASKS + b',"name":"\\udc00"}',
    "encoded surrogate": b"{" + TASKS + b',"name":"\xed\xa0\x80"}',
    "not UTF-8": b"{" + TASKS + b',"name":"\xff"}',
    "single quotes": b"{'tasks':[]}",
    "comment": b"{/* x */" + TASKS + b"}",
    "open string of escapes": b'{"name":"' + b'\\"' * 200_000,
    "brackets in an open string": b'{"name":"' + b"[" * 500_000,
}
DEEP_BUT_WRONG_AT_ONCE = [
    b"[" * 1_000_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
]


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_body_that_is_not_json_is_refused(world: World, raw: bytes) -> None:
    seen = await world.post("/v1/jobs", raw=raw, headers={"Content-Type": "application/json"})

    assert (seen.status, seen.code) == (400, "malformed_json")


@pytest.mark.parametrize("raw", DEEP_BUT_WRONG_AT_ONCE, ids=lambda raw: repr(raw[:12]))
async def test_what_is_wrong_at_its_first_byte_is_read_no_further(world: World, raw: bytes) -> None:
    seen = await world.post("/v1/jobs", raw=raw)

    assert (seen.status, seen.code) == (400, "invalid_argument")


@pytest.mark.parametrize("raw", [b"[]", b"null", b"1", b'"x"', b"true"])
async def test_json_that_is_no_object_is_refused(world: World, raw: bytes) -> None:
    seen = await world.post("/v1/jobs", raw=raw)

    assert (seen.status, seen.code) == (400, "invalid_argument")


async def test_ten_million_elements_are_refused_at_the_first(world: World) -> None:
    seen = await world.post("/v1/jobs", raw=b'{"tasks":[' + b"0," * 10_000_000 + b"0]}")

    assert (seen.status, seen.json["errors"][0]["pointer"]) == (400, "/tasks/0")


@pytest.mark.parametrize(
    ("body", "is_deep"),
    [
        (_nest(DEEP), False),
        (_nest(DEEP + 1), True),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, False),
        (b'{"a":[' * (DEEP // 2 + 1) + b"]}" * (DEEP // 2 + 1), True),
        (b"[" + b"{}," * 100 + b"[]]", False),
        (b'["' + b"[" * 100 + b'"]', False),
        (b'["\\"' + b"[" * 100 + b'"]', False),
        (b'["\\\\", ' + b"[" * 100 + b"]" * 100 + b"]", True),
    ],
)
def test_depth_is_told_from_the_brackets_outside_of_strings(body: bytes, is_deep: bool) -> None:
    assert is_too_deep(body) is is_deep


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "text/json",
     "application/json; charset=utf-16", "application/json; charset=latin1", "multipart/form-data"],
)  # fmt: skip
async def test_only_json_is_taken(world: World, content_type: str) -> None:
    raw = b"{" + TASKS + b"}"

    seen = await world.post("/v1/jobs", raw=raw, headers={"Content-Type": content_type})

    assert (seen.status, seen.code) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", 'Application/JSON; charset="UTF-8"'],
)
async def test_json_in_utf_8_is_taken_however_it_is_spelt(world: World, content_type: str) -> None:
    raw = b"{" + TASKS + b"}"

    seen = await world.post("/v1/jobs", raw=raw, headers={"Content-Type": content_type})

    assert seen.status == 201


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "nonsense"])
async def test_a_body_encoded_in_another_way_than_gzip_is_not_taken(
    world: World, encoding: str
) -> None:
    headers = {"Content-Encoding": encoding}

    for path in ("/v1/jobs", "/v1/jobs/01JZZZZZZZZZZZZZZZZZZZZZZZ/stop"):
        seen = await world.post(path, raw=b"\x1f\x8b\x08", headers=headers)
        assert (seen.status, seen.code) == (415, "unsupported_media_type")


async def test_a_length_over_the_cap_is_refused_before_a_byte_is_read(world: World) -> None:
    headers = {"Content-Length": str(10 * 1024**3), "Content-Type": "application/json"}

    seen = await world.post("/v1/jobs", raw=b"{}", headers=headers)

    assert (seen.status, seen.code) == (413, "request_too_large")


async def test_a_body_where_none_is_needed_may_be_small_only(world: World) -> None:
    job = await world.submit()
    path = f"/v1/jobs/{job['job_id']}/pause"

    small = await world.post(path, raw=b"{}")
    large = await world.post(path, raw=b" " * 100_000)

    assert (small.status, large.status) == (200, 413)


async def test_a_body_that_dawdles_is_cut_off(
    world: World, autojump_clock: trio.testing.MockClock
) -> None:
    client = world.app.test_client()
    headers = {"X-API-Key": "k", "Content-Type": "application/json"}
    async with client.request("/v1/jobs", method="POST", headers=headers) as connection:
        started_at = trio.current_time()
        for _ in range(3):
            await connection.send(b" ")
            await trio.sleep(9)
        await trio.sleep(9)
    response = await connection.as_response()

    assert response.status_code == 408
    assert (await response.get_json(force=True))["code"] == "request_timeout"
    assert trio.current_time() - started_at < 40


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v1/jobs/", 404),
        ("GET", "/v1//jobs", 404),
        ("GET", "/v1/jobs//", 404),
        ("GET", "/v2/jobs", 404),
        ("GET", "/v1/JOBS", 404),
        ("GET", "/v1%2Fjobs", 404),
        ("GET", "/v1/jobs/a%2Fresults", 404),
        ("POST", "/v1/jobs/a%2fstop", 404),
        ("GET", "/v1/jobs/../jobs", 404),
        ("GET", "/.env", 404),
        ("GET", "/static/x", 404),
        ("PUT", "/v1/jobs", 405),
        ("PATCH", "/v1/jobs/x", 405),
        ("OPTIONS", "/v1/jobs", 405),
        ("TRACE", "/v1/jobs", 405),
        ("BREW", "/v1/jobs", 405),
        ("GET", "/v1/jobs/x/stop", 405),
        ("DELETE", "/healthz", 405),
    ],
)
async def test_an_address_that_is_not_ours_is_a_problem(
    world: World, method: str, path: str, status: int
) -> None:
    seen = await world.call(method, path)

    assert seen.status == status
    assert ("Allow" in seen.headers) is (status == 405)


async def test_a_head_request_is_a_get_without_a_body(world: World) -> None:
    seen = await world.call("HEAD", "/v1/jobs")

    assert seen.status == 200


@pytest.mark.parametrize(
    "host", ["a b", "evil.example/../x", "[::1", "a" * 64, "é", "a..b", "a:b", "a@b"]
)
async def test_a_strange_host_is_refused(world: World, host: str) -> None:
    seen = await world.get("/v1/jobs", headers={"Host": host})

    assert (seen.status, seen.code) == (400, "invalid_argument")


@pytest.mark.parametrize("request_id", ["abc", "a" * 128, "x-1.2_3 ~"])
async def test_a_sane_request_id_comes_back(world: World, request_id: str) -> None:
    seen = await world.get("/v1/jobs/x", headers={"X-Request-ID": request_id})

    assert seen.headers["X-Request-ID"] == request_id
    assert seen.json["instance"] == request_id


@pytest.mark.parametrize("request_id", ["", "a" * 129, "é", "a\tb"])
async def test_a_strange_request_id_is_replaced(world: World, request_id: str) -> None:
    seen = await world.get("/v1/jobs/x", headers={"X-Request-ID": request_id})

    assert len(seen.headers["X-Request-ID"]) == 26
    assert seen.json["instance"] == seen.headers["X-Request-ID"]


def _targets() -> Iterator[tuple[str, str]]:
    for route in ROUTES:
        if route.method == "POST":
            yield route.method, route.path


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["tasks", "url", "metadata", "zenrows_params", "custom_headers", "webhook", "name", "status",
     "type", "body", "method", "external_id", "last_batch", "priority", "schedule", "wait"]
)  # fmt: skip
NEARLY = st.recursive(
    JSONISH,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=6),
    max_leaves=12,
)
RAW = st.binary(max_size=200) | st.dictionaries(FIELDS, NEARLY, max_size=6).map(
    lambda value: json.dumps(value).encode(errors="surrogatepass")
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=RAW, target=st.sampled_from(sorted(_targets())))
def test_no_body_makes_us_fall_over(raw: bytes, target: tuple[str, str]) -> None:
    async def scenario() -> int:
        world = make_world()
        job = (await world.post("/v1/jobs", {"status": "open"})).json
        method, path = target
        seen = await world.call(
            method,
            path.replace("{job_id}", job["job_id"]),
            raw=raw,
            headers={"Content-Type": "application/json"},
        )
        return seen.status

    assert trio.run(scenario) < 500
