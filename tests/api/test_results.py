"""Results: pages, bodies, links and histories."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from conveyor.domain import limits
from conveyor.domain.model import Format, Result
from conveyor.domain.submit.scraper_params import content_type_for
from tests.api.world import BERT, World


async def test_results_carry_their_index_and_their_outcome(world: World) -> None:
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    good, bad, _ = await world.tasks_of(job_id, run_id)
    await world.succeed(job_id, good)
    await world.fail(job_id, bad)

    seen = await world.get(f"/v1/jobs/{job_id}/results")
    same = await world.get(f"/v1/jobs/{job_id}/runs/{run_id}/results")

    first, second, third = sorted(seen.json["results"], key=lambda row: row["index"])
    assert first["type"] == "html"
    assert first["result_url"].startswith("http://localhost/v1/jobs/")
    assert second["error"]["code"] == "target_not_found"
    assert second["result_url"] is None
    assert third["status"] == "pending"
    assert "type" not in third
    assert "method" not in third
    assert same.body == seen.body


async def test_results_are_paged_and_filtered(world: World) -> None:
    job = await world.submit(7)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    rows = await world.tasks_of(job_id, run_id)
    for task in rows[:3]:
        await world.succeed(job_id, task)
    await world.fail(job_id, rows[3])

    async def pages(status: str) -> list[int]:
        indices: list[int] = []
        path = f"/v1/jobs/{job_id}/results?status={status}&limit=2"
        cursor = ""
        while True:
            page = (await world.get(path + cursor)).json
            indices += [row["index"] for row in page["results"]]
            if page["next_cursor"] is None:
                return sorted(indices)
            cursor = f"&cursor={page['next_cursor']}"

    assert await pages("all") == list(range(7))
    assert await pages("successful") == [0, 1, 2]
    assert await pages("failed") == [3]
    assert await pages("processing") == [4, 5, 6]


@pytest.mark.parametrize("query", ["status=pending", "status=", "limit=0", "limit=1001"])
async def test_a_bad_results_query_is_refused(world: World, query: str) -> None:
    job = await world.submit()

    seen = await world.get(f"/v1/jobs/{job['job_id']}/results?{query}")

    assert (seen.status, seen.code) == (400, "invalid_argument")


async def test_a_body_is_served_to_be_saved_not_run(world: World) -> None:
    job = await world.submit(1)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    (task,) = await world.tasks_of(job_id, run_id)
    body = bytes(range(256)) * 1000
    await world.succeed(job_id, task, body)

    latest = await world.get(f"/v1/jobs/{job_id}/tasks/{task.task_id}/content")
    exact = await world.get(f"/v1/jobs/{job_id}/runs/{run_id}/tasks/{task.task_id}/content")

    assert latest.status == exact.status == 200
    assert latest.body == exact.body == body
    assert exact.headers["Content-Type"] == "text/html; charset=utf-8"
    assert exact.headers["Content-Length"] == str(len(body))
    assert exact.headers["Content-Disposition"] == f'attachment; filename="{task.task_id}.html"'
    assert "sandbox" in exact.headers["Content-Security-Policy"]


async def test_an_empty_body_is_a_body(world: World) -> None:
    job = await world.submit(1)
    (task,) = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    await world.succeed(job["job_id"], task, b"")

    seen = await world.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert (seen.status, seen.body, seen.headers["Content-Length"]) == (200, b"", "0")


async def test_a_task_that_has_not_ended_has_no_content_yet(world: World) -> None:
    job = await world.submit(1)
    (task,) = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])

    seen = await world.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert (seen.status, seen.code) == (409, "task_not_ready")


async def test_the_content_of_a_failed_task_is_its_problem(world: World) -> None:
    job = await world.submit(1)
    (task,) = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    await world.fail(job["job_id"], task)

    seen = await world.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert seen.status == 422
    assert (seen.code, seen.json["status"]) == ("target_not_found", 404)


async def test_a_body_that_is_no_longer_stored_is_not_found(world: World) -> None:
    job = await world.submit(1)
    (task,) = await world.finish(job)
    await world.env.blobs.delete_prefix(f"jobs/{job['job_id']}")

    seen = await world.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert (seen.status, seen.code) == (404, "not_found")


async def _link(world: World) -> str:
    job = await world.submit(1)
    await world.finish(job)
    row = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"][0]
    url = urlsplit(row["result_url"])
    return f"{url.path}?{url.query}"


async def test_a_result_link_works_without_a_key(world: World) -> None:
    seen = await world.get(await _link(world), key=None)

    assert (seen.status, seen.body) == (200, b"<p>")


@pytest.mark.parametrize(
    "change",
    [
        lambda link: link[:-1] + ("A" if link[-1] != "A" else "B"),
        lambda link: link[:-4],
        lambda link: link.partition("=")[0] + "=",
        lambda link: link.partition("=")[0] + "=1.x",
        lambda link: link.partition("=")[0] + "=%C3%A9.%C3%A9",
        lambda link: link.partition("=")[0] + "=" + "9" * 5000,
        lambda link: link.replace("=1", "=2"),
        lambda link: link.replace("/tasks/", "/tasks/0"),
    ],
)
async def test_a_changed_link_leads_nowhere(world: World, change: object) -> None:
    assert callable(change)
    seen = await world.get(change(await _link(world)), key=None)

    assert (seen.status, seen.code) == (404, "not_found")


async def test_a_link_of_one_task_opens_no_other(world: World) -> None:
    job = await world.submit(2)
    await world.finish(job)
    one, two = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]
    token = one["result_url"].partition("token=")[2]
    path = urlsplit(two["result_url"]).path

    seen = await world.get(f"{path}?token={token}", key=None)

    assert seen.status == 404


async def test_a_link_ends_with_its_day_and_with_its_job(world: World) -> None:
    link = await _link(world)
    world.clock.advance(limits.RESULT_URL_TTL_S + 1)
    assert (await world.get(link, key=None)).status == 404

    fresh = await _link(world)
    assert (await world.get(fresh, key=None)).status == 200
    await world.call("DELETE", "/".join(fresh.split("/")[:4]))

    assert (await world.get(fresh, key=None)).status == 404


async def test_a_token_opens_nothing_but_content(world: World) -> None:
    link = await _link(world)

    history = await world.get(link.replace("/content", "/history"), key=None)
    latest = await world.get(
        "/".join(link.split("/")[:4]) + "/tasks/" + link.split("/tasks/")[1], key=None
    )

    assert history.status == latest.status == 401


async def test_history_tells_of_every_try(world: World) -> None:
    job = await world.submit(1)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    (task,) = await world.finish(job)

    latest = await world.get(f"/v1/jobs/{job_id}/tasks/{task.task_id}/history")
    exact = await world.get(f"/v1/jobs/{job_id}/runs/{run_id}/tasks/{task.task_id}/history")

    assert latest.body == exact.body
    assert exact.json["events"] == [
        {
            "attempt": 1,
            "started_at": "2023-11-14T22:13:20.000Z",
            "ended_at": "2023-11-14T22:13:20.000Z",
            "spend": {"credits": 1, "cost": 0.0025},
        }
    ]


async def test_an_inherited_result_is_served_from_its_source(world: World) -> None:
    job = await world.submit(2)
    job_id = job["job_id"]
    good, bad = await world.tasks_of(job_id, job["latest_run"]["run_id"])
    await world.succeed(job_id, good, b"first")
    await world.fail(job_id, bad)
    await world.post(f"/v1/jobs/{job_id}/rerun?status=failed")

    seen = await world.get(f"/v1/jobs/{job_id}/tasks/{good.task_id}/content")

    assert (seen.status, seen.body) == (200, b"first")


async def test_a_foreign_key_with_a_good_token_still_reads_the_link_only(world: World) -> None:
    seen = await world.get(await _link(world), key=BERT)

    assert seen.status == 200


@pytest.mark.parametrize(
    ("body_format", "stored", "answered"),
    [
        (Format.HTML, "text/html", "text/html; charset=utf-8"),
        (Format.HTML, "", "text/html; charset=utf-8"),
        (Format.HTML, "text/html; charset=iso-8859-1", "text/html; charset=iso-8859-1"),
        (Format.HTML, "image/png", "image/png"),
        (Format.HTML, "image/png\r\nX: y", "text/html; charset=utf-8"),
        (Format.HTML, "nonsense", "text/html; charset=utf-8"),
        (Format.JSON, "text/html", "application/json"),
        (Format.PDF, "image/png", "application/pdf"),
        (Format.MARKDOWN, "text/html", "text/markdown; charset=utf-8"),
    ],
)
def test_a_body_has_the_type_of_its_format_unless_the_page_was_something_else(
    body_format: Format, stored: str, answered: str
) -> None:
    result = Result("key", 1, "sha", stored, 200)

    assert content_type_for(body_format, result) == answered
