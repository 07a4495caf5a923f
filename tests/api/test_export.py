"""Exports over HTTP: asked for, watched, fetched without a key, and gone in time."""

from __future__ import annotations

import io
import zipfile
from typing import Any
from urllib.parse import urlsplit

import pytest

from conveyor.domain import limits
from conveyor.usecases import export as exports
from tests.api.world import BERT, World, make_world


async def an_ended_job(world: World, count: int = 3, **fields: Any) -> tuple[str, str]:
    """The addresses of a run, one task of which failed."""
    job = await world.submit(count, **fields)
    rows = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    for task in rows[1:]:
        await world.succeed(job["job_id"], task, f"page {task.index}".encode())
    await world.fail(job["job_id"], rows[0])
    run = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    return run, f"{run}/exports"


async def made(world: World, address: str, query: str = "") -> Any:
    """The view of an export that an exporter has seen to."""
    started = await world.post(address + query)
    assert started.status == 202
    for export in await exports.due(world.env, limit=10):
        await exports.process(world.env, export)
    return (await world.get(f"{address}/{started.json['export_id']}")).json


def path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


S3 = {"bucket": "bkt", "key": "k", "access_key_id": "id", "secret_access_key": "very-private"}


@pytest.mark.parametrize(
    ("destination", "shown"),
    [
        ({"url": "https://example.com/f?sig=very-private"}, "https://example.com/f"),
        ({"s3": S3}, "https://bkt.s3.us-east-1.amazonaws.com/k"),
        (
            {"s3": {**S3, "bucket": "b.c", "key": "a key/é", "region": "eu-west-1"}},
            "https://s3.eu-west-1.amazonaws.com/b.c/a%20key/%C3%A9",
        ),
        (
            {"s3": {**S3, "endpoint": "https://store.example.com/"}},
            "https://store.example.com/bkt/k",
        ),
    ],
)
async def test_a_destination_is_shown_without_its_secrets(
    world: World, destination: dict[str, Any], shown: str
) -> None:
    _, address = await an_ended_job(world)

    started = await world.post(address, {"destination": destination})

    seen = await world.get(f"{address}/{started.json['export_id']}")
    assert (started.status, seen.json["destination"]) == (202, shown)
    assert b"very-private" not in started.body + seen.body


@pytest.mark.parametrize(
    "destination",
    [
        {},
        {"url": "https://example.com/f", "s3": S3},
        {"url": "http://example.com/f"},
        {"url": "https://127.0.0.1/f"},
        {"url": "https://example.com:8443/f"},
        {"s3": {**S3, "endpoint": "https://169.254.169.254"}},
        {"s3": {**S3, "endpoint": "https://store.internal"}},
        {"s3": {**S3, "bucket": "../b"}},
        {"s3": {**S3, "region": "eu.example.com/"}},
        {"s3": {**S3, "secret_access_key": "with\nbreak"}},
    ],
)
async def test_a_destination_that_may_not_be_reached_is_refused(
    world: World, destination: dict[str, Any]
) -> None:
    _, address = await an_ended_job(world)

    seen = await world.post(address, {"destination": destination})

    assert seen.status == 400
    assert b"very-private" not in seen.body


async def test_an_export_is_pending_then_completed_with_a_link_and_a_manifest(
    world: World,
) -> None:
    _, address = await an_ended_job(world)

    started = (await world.post(address)).json
    before = (await world.get(f"{address}/{started['export_id']}")).json
    (export,) = await exports.due(world.env, limit=10)
    await exports.process(world.env, export)
    after = (await world.get(f"{address}/{started['export_id']}")).json

    assert started["status"] == before["status"] == "pending"
    assert "download_url" not in before
    assert after["status"] == "completed"
    assert (after["done"], after["total"]) == (3, 3)
    assert after["manifest"]["counts"] == {"successful": 2, "failed": 1}


async def test_the_link_works_without_a_key_and_says_how_long_the_file_is(world: World) -> None:
    _, address = await an_ended_job(world)
    export = await made(world, address)

    seen = await world.get(path_of(export["download_url"]), key=None)

    assert seen.status == 200
    assert seen.headers["Content-Type"] == "application/zip"
    assert int(seen.headers["Content-Length"]) == len(seen.body) == export["size_bytes"]
    assert seen.headers["ETag"] == f'"{export["sha256"]}"'
    assert export["file_name"] in seen.headers["Content-Disposition"]
    with zipfile.ZipFile(io.BytesIO(seen.body)) as archive:
        names = archive.namelist()
    assert len([name for name in names if name.endswith(".html")]) == 2


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [
        ("zip", "application/zip"),
        ("jsonl", "application/x-ndjson"),
        ("csv", "text/csv; charset=utf-8; header=present"),
        ("warc", "application/warc"),
    ],
)
async def test_every_format_can_be_had(world: World, kind: str, media_type: str) -> None:
    _, address = await an_ended_job(world)

    export = await made(world, address, f"?format={kind}")
    seen = await world.get(path_of(export["download_url"]), key=None)

    assert export["format"] == kind
    assert seen.headers["Content-Type"] == media_type


@pytest.mark.parametrize("query", ["?format=rar", "?format=", "?format=zip&format=csv"])
async def test_a_format_that_is_none_is_refused(world: World, query: str) -> None:
    _, address = await an_ended_job(world)

    assert (await world.post(address + query)).status == 400


async def test_a_link_to_one_file_opens_no_other_and_dies_in_time(world: World) -> None:
    _, address = await an_ended_job(world)
    one, two = await made(world, address), await made(world, address)
    token = urlsplit(one["download_url"]).query

    other = await world.get(f"{urlsplit(two['download_url']).path}?{token}", key=None)
    world.clock.advance(limits.EXPORT_URL_TTL_S + 1)
    late = await world.get(path_of(one["download_url"]), key=None)
    again = (await world.get(f"{address}/{one['export_id']}")).json["download_url"]

    assert (other.status, late.status) == (404, 404)
    assert (await world.get(path_of(again), key=None)).status == 200


async def test_the_link_dies_with_the_run(world: World) -> None:
    run, address = await an_ended_job(world)
    export = await made(world, address)

    await world.call("DELETE", run)

    assert (await world.get(path_of(export["download_url"]), key=None)).status == 404


async def test_nobody_else_sees_an_export(world: World) -> None:
    _, address = await an_ended_job(world)
    export = await made(world, address)

    foreign = await world.get(f"{address}/{export['export_id']}", key=BERT)
    content = await world.get(f"{address}/{export['export_id']}/content", key=BERT)
    mine = await world.get(f"{address}/{export['export_id']}/content")

    assert (foreign.status, content.status, mine.status) == (404, 404, 200)


@pytest.mark.parametrize(
    ("range_header", "start", "end"),
    [
        ("bytes=0-", 0, None),
        ("bytes=5-", 5, None),
        ("bytes=2-4", 2, 5),
        ("bytes=7-999999999", 7, None),
    ],
)
async def test_a_file_is_had_from_some_byte_on(
    world: World, range_header: str, start: int, end: int | None
) -> None:
    _, address = await an_ended_job(world)
    export = await made(world, address)
    path = path_of(export["download_url"])
    whole = (await world.get(path, key=None)).body

    seen = await world.get(path, key=None, headers={"Range": range_header})

    assert seen.body == whole[start:end]
    assert int(seen.headers["Content-Length"]) == len(seen.body)
    if len(seen.body) < len(whole):
        last = start + len(seen.body) - 1
        assert seen.status == 206
        assert seen.headers["Content-Range"] == f"bytes {start}-{last}/{len(whole)}"
    else:
        assert seen.status == 200


@pytest.mark.parametrize(
    "range_header", ["bytes=-5", "bytes=1-2,4-5", "bytes=9-3", "lines=1-2", "bytes=x-"]
)
async def test_any_other_way_to_ask_for_a_part_gets_the_whole(
    world: World, range_header: str
) -> None:
    _, address = await an_ended_job(world)
    export = await made(world, address)

    seen = await world.get(
        path_of(export["download_url"]), key=None, headers={"Range": range_header}
    )

    assert (seen.status, len(seen.body)) == (200, export["size_bytes"])


async def test_a_part_behind_the_end_is_refused(world: World) -> None:
    _, address = await an_ended_job(world)
    export = await made(world, address)
    range_header = {"Range": f"bytes={export['size_bytes']}-"}

    seen = await world.get(path_of(export["download_url"]), key=None, headers=range_header)

    assert (seen.status, seen.code) == (416, "range_not_satisfiable")


async def test_the_file_of_an_export_that_is_not_made_cannot_be_had(world: World) -> None:
    _, address = await an_ended_job(world)
    started = (await world.post(address)).json

    seen = await world.get(f"{address}/{started['export_id']}/content")

    assert (seen.status, seen.code) == (409, "export_not_ready")


async def test_a_live_run_is_refused_and_an_expired_one_is_gone(world: World) -> None:
    live = await world.submit(1)
    refused = await world.post(
        f"/v1/jobs/{live['job_id']}/runs/{live['latest_run']['run_id']}/exports"
    )
    _, address = await an_ended_job(world, result_ttl_days=1)
    world.clock.advance(86_400)

    assert (refused.status, refused.code) == (409, "run_not_terminal")
    gone = await world.post(address)
    assert (gone.status, gone.code) == (410, "result_expired")


async def test_an_expired_export_is_an_unknown_one(world: World) -> None:
    _, address = await an_ended_job(world)
    export = await made(world, address)

    world.clock.advance(limits.EXPORT_TTL_S)

    assert (await world.get(f"{address}/{export['export_id']}")).status == 404


async def test_a_repeated_request_is_the_same_export(world: World) -> None:
    _, address = await an_ended_job(world)
    headers = {"Idempotency-Key": "once"}

    first = await world.post(address, headers=headers)
    again = await world.post(address, headers=headers)
    other = await world.post(address)

    assert first.body == again.body
    assert other.json["export_id"] != first.json["export_id"]
    assert len(await exports.due(world.env, limit=10)) == 2


async def test_an_expired_result_is_shown_as_such_and_its_content_is_gone(world: World) -> None:
    run, _ = await an_ended_job(world, result_ttl_days=2)
    before = (await world.get(f"{run}/results?status=successful")).json["results"]
    job = (await world.get(run)).json

    world.clock.advance(2 * 86_400)
    after = (await world.get(f"{run}/results?status=successful")).json["results"]
    content = await world.get(f"{run}/tasks/{before[0]['task_id']}/content")
    failed = (await world.get(f"{run}/results?status=failed")).json["results"]

    assert job["results_expire_at"] == "2023-11-16T22:13:20.000Z"
    assert [row["status"] for row in before] == ["successful", "successful"]
    assert [(row["status"], row["result_url"]) for row in after] == [("expired", None)] * 2
    assert (content.status, content.code) == (410, "result_expired")
    assert "2023-11-16T22:13:20Z" in content.json["detail"]
    assert [row["status"] for row in failed] == ["failed"]


@pytest.mark.parametrize("days", [0, -1, 366, 1.5, "7"])
async def test_results_are_kept_for_a_sane_number_of_days(world: World, days: object) -> None:
    body = {"tasks": [{"url": "https://example.com/"}], "result_ttl_days": days}

    seen = await world.post("/v1/jobs", body)

    assert seen.status == 400
    assert seen.json["errors"][0]["pointer"] == "/result_ttl_days"


async def test_the_days_that_this_server_keeps_bodies_are_told_to_who_asks_for_more() -> None:
    world = make_world(body_days=7)
    body = {"tasks": [{"url": "https://example.com/"}]}

    refused = await world.post("/v1/jobs", {**body, "result_ttl_days": 8})
    plain = (await world.post("/v1/jobs", body)).json
    job = (await world.get(f"/v1/jobs/{plain['job_id']}")).json

    assert (refused.status, refused.code) == (400, "invalid_argument")
    assert refused.json["errors"][0]["pointer"] == "/result_ttl_days"
    assert "at most 7 days" in refused.json["detail"]
    assert job["result_ttl_days"] == 7
