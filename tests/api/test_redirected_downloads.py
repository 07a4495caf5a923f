"""Bodies that the storage hands out itself: where the API sends whoever asks for one."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from conveyor.domain import limits
from conveyor.engines.memory.blobs import MemoryBlobs
from conveyor.usecases import export as exports
from tests.api.world import BERT, World, make_world


class DirectBlobs(MemoryBlobs):
    """Their addresses say what was asked for."""

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str:
        params = {"type": content_type, "name": filename, "at": int(expires_at)}
        return f"https://bucket.test/{key}?{urlencode(params)}"


@pytest.fixture
def world() -> World:
    return make_world(blobs=DirectBlobs())


def headers_of(address: str) -> dict[str, str]:
    return {name: value for name, [value] in parse_qs(urlsplit(address).query).items()}


async def test_a_body_is_a_redirect_to_where_it_lies_as_the_file_it_would_have_been(
    world: World,
) -> None:
    job = await world.submit(1)
    [task] = await world.finish(job)

    seen = await world.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content?redirect=true")

    assert (seen.status, seen.body) == (302, b"")
    assert seen.headers["Cache-Control"] == "no-store"
    address = seen.headers["Location"]
    assert urlsplit(address).path.startswith(f"/jobs/{job['job_id']}/runs/")
    assert headers_of(address) == {
        "type": "text/html; charset=utf-8",
        "name": f"{task.task_id}.html",
        "at": str(int(world.clock.now() + limits.DIRECT_URL_TTL_S)),
    }


async def test_a_link_without_a_key_leads_there_too_and_a_foreign_caller_nowhere(
    world: World,
) -> None:
    job = await world.submit(1)
    await world.finish(job)
    [row] = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]
    link = urlsplit(row["result_url"])

    seen = await world.get(f"{link.path}?{link.query}&redirect=true", key=None)
    foreign = await world.get(link.path, key=BERT)

    assert seen.status == 302
    assert foreign.status == 404


async def test_who_does_not_ask_for_a_redirect_is_given_the_body(world: World) -> None:
    job = await world.submit(1)
    [task] = await world.finish(job)
    path = f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content"

    responses = [await world.get(path), await world.get(f"{path}?redirect=false")]
    odd = await world.get(f"{path}?redirect=perhaps")

    assert [(seen.status, seen.body) for seen in responses] == [(200, b"<p>")] * 2
    assert (odd.status, odd.code) == (400, "invalid_argument")


async def test_the_problem_of_a_failed_task_comes_from_us(world: World) -> None:
    job = await world.submit(1)
    [task] = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    await world.fail(job["job_id"], task)

    seen = await world.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert seen.status == 422


async def test_a_deleted_job_leads_nowhere(world: World) -> None:
    job = await world.submit(1)
    [task] = await world.finish(job)
    path = f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content"

    await world.call("DELETE", f"/v1/jobs/{job['job_id']}")

    assert (await world.get(path)).status == 404


async def test_the_file_of_an_export_is_a_redirect_once_it_is_made(world: World) -> None:
    job = await world.submit(1)
    await world.finish(job)
    address = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/exports"
    export_id = (await world.post(f"{address}?format=csv")).json["export_id"]

    early = await world.get(f"{address}/{export_id}/content?redirect=true")
    for export in await exports.due(world.env, limit=10):
        await exports.process(world.env, export)
    seen = await world.get(f"{address}/{export_id}/content?redirect=true")

    assert early.code == "export_not_ready"
    assert seen.status == 302
    assert headers_of(seen.headers["Location"])["name"].endswith(".csv")


async def test_no_address_outlives_what_it_leads_to() -> None:
    world = make_world(blobs=DirectBlobs(), body_days=1)
    job = await world.submit(1)
    [task] = await world.finish(job)
    run = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    world.clock.advance(86_400 - 60)
    export_id = (await world.post(f"{run}/exports?format=csv")).json["export_id"]
    for export in await exports.due(world.env, limit=10):
        await exports.process(world.env, export)

    body = await world.get(f"{run}/tasks/{task.task_id}/content?redirect=true")
    file = await world.get(f"{run}/exports/{export_id}/content?redirect=true")

    ends = [headers_of(seen.headers["Location"])["at"] for seen in (body, file)]
    assert ends == [str(int(world.clock.now() + 60))] * 2
