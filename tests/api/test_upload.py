"""Uploaded lists over HTTP: slots, uploads without a key, and jobs made of them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from zenrows.batch import BatchAPIError, ZenRowsBatchClient

from conveyor.api.server import request
from conveyor.domain import limits
from conveyor.domain.ids import JobId, RunId
from conveyor.usecases.run import reconcile
from conveyor.usecases.run.ingest import open_batches_of
from tests.api.server.test_sockets import Server, served
from tests.api.world import ANNA, BERT, Seen, World

CSV = {"header": True, "fields": {"url": "link", "external_id": "name"}}
ROWS = b'name,link\nn1,https://example.com/1\nn2,"https://example.com/2"\nn3,ftp://example.com/3\n'
UNKNOWN = "01JZZZZZZZZZZZZZZZZZZZZZZZ"


async def a_slot(world: World, body: object = None) -> Any:
    seen = await world.post("/v1/job_inputs", body or {"type": "csv", "csv": CSV})
    assert seen.status == 201, seen.body
    return seen.json


def path_of(slot: Any) -> str:
    url: str = slot["upload"]["url"]
    return "/" + url.split("/", 3)[3]


async def put(world: World, path: str, content: bytes, **headers: str) -> Seen:
    sent = {"Content-Length": str(len(content)), "Content-Type": "text/csv", **headers}
    return await world.call("PUT", path, raw=content, key=None, headers=sent)


async def submit(world: World, slot: Any, key: str = ANNA) -> Seen:
    body = {"file_input_id": slot["file_input_id"]}
    return await world.post("/v1/jobs", body, key=key)


async def ingest(world: World, job: Any) -> None:
    job_id, run_id = JobId(job["job_id"]), RunId(job["latest_run"]["run_id"])
    for batch in await open_batches_of(world.env, job_id, run_id):
        await reconcile.finish_batch(world.env, batch)


async def test_a_list_is_uploaded_without_a_key_and_becomes_a_job(world: World) -> None:
    slot = await a_slot(world)
    uploaded = await put(world, path_of(slot), ROWS)

    seen = await submit(world, slot)
    await ingest(world, seen.json)

    job = seen.json
    run = (await world.get(f"/v1/jobs/{job['job_id']}")).json["latest_run"]
    results = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]
    rows = sorted((row["index"], row["url"], row["external_id"]) for row in results)
    assert (uploaded.status, uploaded.json["size_bytes"]) == (200, len(ROWS))
    assert slot["upload"]["method"] == "PUT"
    assert slot["upload"]["headers"] == {"Content-Type": "text/csv"}
    assert seen.status == 202
    assert (job["accepted_tasks"], job["latest_run"]["ingest_status"]) == (3, "pending")
    assert (run["ingest_status"], run["stats"]["total"], run["stats"]["failed"]) == ("done", 3, 1)
    assert rows == [
        (0, "https://example.com/1", "n1"),
        (1, "https://example.com/2", "n2"),
        (2, "ftp://example.com/3", "n3"),
    ]
    failed = [row for row in results if row["status"] == "failed"]
    assert [row["error"]["code"] for row in failed] == ["unsupported_scheme"]


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ({"format": "text"}, b"https://example.com/1\nhttps://example.com/2\n"),
        ({"format": "text"}, gzip.compress(b"https://example.com/1\nhttps://example.com/2\n")),
        ({"format": "ndjson"}, b'{"url": "https://example.com/1"}\n"https://example.com/2"'),
        ({"type": "csv", "csv": {"fields": {"url": 1}, "delimiter": ";"}}, b"a;https://b.c\n;x"),
    ],
    ids=["text", "gzip", "ndjson", "csv by position"],
)
async def test_every_format_is_read_as_the_slot_says(
    world: World, body: dict[str, Any], content: bytes
) -> None:
    slot = await a_slot(world, body)
    await put(world, path_of(slot), content)

    assert (await submit(world, slot)).json["accepted_tasks"] == 2


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"type": "csv"}, "/csv"),
        ({"type": "xlsx"}, "/type"),
        ({"format": "xml"}, "/format"),
        ({"format": "text", "csv": CSV}, "/csv"),
        ({"csv": {}}, "/csv/fields"),
        ({"csv": {"fields": {}}}, "/csv/fields/url"),
        ({"csv": {"fields": {"url": -1}}}, "/csv/fields/url"),
        ({"csv": {"fields": {"url": ""}}}, "/csv/fields/url"),
        ({"csv": {"fields": {"url": 1.5}}}, "/csv/fields/url"),
        ({"csv": {"fields": {"url": "link"}}}, "/csv/fields/url"),
        ({"csv": {"fields": {"url": 0, "external_id": "x"}}}, "/csv/fields/external_id"),
        ({"csv": {"fields": {"url": 0, "other": 1}}}, "/csv/fields/other"),
        ({"csv": {"fields": {"url": 0}, "delimiter": ",,"}}, "/csv/delimiter"),
        ({"csv": {"fields": {"url": 0}, "delimiter": "\n"}}, "/csv/delimiter"),
        ({"csv": {"fields": {"url": 0}, "delimiter": "\0"}}, "/csv/delimiter"),
        ({"csv": {"fields": {"url": 0}, "quote": ","}}, "/csv/quote"),
    ],
)
async def test_a_way_to_read_that_cannot_be_is_pointed_at(
    world: World, body: dict[str, Any], pointer: str
) -> None:
    seen = await world.post("/v1/job_inputs", body)

    assert (seen.status, seen.code) == (400, "invalid_argument")
    assert seen.json["errors"][0]["pointer"] == pointer


async def test_the_same_key_makes_one_slot(world: World) -> None:
    headers = {"Idempotency-Key": "one"}
    first = await world.post("/v1/job_inputs", {"format": "text"}, headers=headers)
    second = await world.post("/v1/job_inputs", {"format": "text"}, headers=headers)

    assert (first.status, first.body) == (second.status, second.body)


async def test_a_second_upload_replaces_the_first_as_a_whole(world: World) -> None:
    slot = await a_slot(world, {"format": "text"})
    await put(world, path_of(slot), b"https://example.com/1\nhttps://example.com/2\n")
    await put(world, path_of(slot), b"https://example.com/3\n")

    assert (await submit(world, slot)).json["accepted_tasks"] == 1


async def test_a_slot_without_a_list_is_a_conflict_and_an_empty_list_a_mistake(
    world: World,
) -> None:
    slot = await a_slot(world)
    never = await submit(world, slot)
    await put(world, path_of(slot), b"name,link\n")
    empty = await submit(world, slot)

    assert (never.status, never.code) == (409, "file_input_not_uploaded")
    assert (empty.status, empty.code) == (400, "invalid_argument")
    assert empty.json["errors"][0]["pointer"] == "/file_input_id"
    assert (await world.get("/v1/jobs")).json["jobs"] == []


async def test_unknown_foreign_and_expired_slots_answer_alike(world: World) -> None:
    slot = await a_slot(world)
    await put(world, path_of(slot), ROWS)
    same = {"X-Request-ID": "the-same"}

    async def ask(input_id: str, key: str) -> Seen:
        return await world.post("/v1/jobs", {"file_input_id": input_id}, key=key, headers=same)

    seen = [await ask(UNKNOWN, ANNA), await ask(slot["file_input_id"], BERT), await ask("", ANNA)]
    world.clock.advance(limits.INPUT_TTL_S)
    seen.append(await ask(slot["file_input_id"], ANNA))

    assert {(response.status, response.code) for response in seen} == {
        (404, "file_input_not_found")
    }
    assert len({response.body for response in seen}) == 1


async def test_only_the_token_of_the_slot_or_its_owner_may_upload(world: World) -> None:
    slot, other = await a_slot(world), await a_slot(world)
    bare, _, token = path_of(slot).partition("?token=")
    wrong = [
        f"{bare}?token={'A' * len(token)}",
        f"{bare}?token=",
        f"{bare}?token={token[:-1]}%C3%A9",
        f"{path_of(other).partition('?')[0]}?token={token}",
    ]

    seen = [await put(world, path, ROWS) for path in wrong]
    by_owner = await put(world, bare, ROWS, **{"X-API-Key": ANNA})
    by_other = await put(world, bare, ROWS, **{"X-API-Key": BERT})
    by_nobody = await put(world, bare, ROWS)
    read = await world.get(path_of(slot), key=None)

    assert {(response.status, response.code) for response in seen} == {
        (404, "file_input_not_found")
    }
    assert (by_owner.status, by_other.status, by_nobody.status) == (200, 404, 401)
    assert read.status == 405


async def test_an_upload_must_say_its_length_and_keep_within_limits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = await a_slot(world)
    path = path_of(slot)

    unsaid = await world.call("PUT", path, raw=ROWS, key=None)
    large = await put(world, path, ROWS, **{"Content-Length": str(limits.UPLOAD_BYTES_MAX + 1)})
    encoded = await put(world, path, ROWS, **{"Content-Encoding": "gzip"})
    short = await put(world, path, ROWS, **{"Content-Length": str(len(ROWS) + 1)})
    never = await submit(world, slot)

    assert [response.status for response in (unsaid, large, encoded, short)] == [411, 413, 415, 400]
    assert unsaid.code == "length_required"
    assert never.code == "file_input_not_uploaded"


@pytest.mark.slow
async def test_an_upload_that_dawdles_or_breaks_off_is_not_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "BODY_TIMEOUT_S", 0.1)
    slot = await a_slot(world)
    head = f"PUT {path_of(slot)} HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n".encode()

    async with served(world) as server:
        slow = await server.exchange(head + ROWS)
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        async with stream:
            await stream.send_all(head + ROWS)
    never = await submit(world, slot)

    assert b" 408 " in slow.partition(b"\r\n")[0]
    assert never.code == "file_input_not_uploaded"


@pytest.mark.slow
async def test_the_unmodified_client_uploads_and_submits(world: World, tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    file.write_bytes(ROWS)

    def scenario(server: Server) -> Any:
        with ZenRowsBatchClient(ANNA, base_url=f"{server.url}/v1") as client:
            fields: dict[str, int | str] = {"url": "link", "external_id": "name"}
            input_id = client.upload_csv(file, fields=fields, header=True)
            with pytest.raises(BatchAPIError) as caught:
                client.submit_regular(file_input_id=UNKNOWN)
            return client.submit_regular(file_input_id=input_id).job_id, caught.value

    async with served(world) as server:
        job_id, refusal = await trio.to_thread.run_sync(scenario, server)
        await ingest(world, (await world.get(f"/v1/jobs/{job_id}")).json)

    run = (await world.get(f"/v1/jobs/{job_id}")).json["latest_run"]
    assert (refusal.status_code, refusal.code) == (404, "file_input_not_found")
    assert (run["stats"]["total"], run["ingest_status"]) == (3, "done")


@pytest.mark.slow
async def test_an_upload_over_a_real_socket_arrives_byte_for_byte(world: World) -> None:
    content = b"".join(b"https://example.com/%d\n" % number for number in range(100_000))
    slot = await a_slot(world, {"format": "text"})
    async with served(world) as server, httpx.AsyncClient(base_url=server.url) as client:
        stored = (await client.put(path_of(slot), content=content)).json()

    accepted = (await submit(world, slot)).json["accepted_tasks"]
    assert (stored["size_bytes"], accepted) == (len(content), 100_000)


async def test_bad_lines_may_be_skipped_inline(world: World) -> None:
    tasks = [{"url": "https://example.com/"}, {"url": "ftp://example.com/"}]

    seen = await world.post("/v1/jobs", {"tasks": tasks, "on_invalid": "skip", "status": "open"})
    job_id = seen.json["job_id"]
    added = await world.post(
        f"/v1/jobs/{job_id}/tasks", {"tasks": tasks, "on_invalid": "skip", "last_batch": True}
    )

    stats = added.json["latest_run"]["stats"]
    assert (seen.status, added.status) == (201, 200)
    assert (stats["total"], stats["failed"], stats["pending"]) == (4, 2, 2)
