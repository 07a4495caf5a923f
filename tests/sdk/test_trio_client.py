"""The Trio client: it has the methods of the synchronous client and uses the connection pool."""

from __future__ import annotations

import hashlib
import inspect
import secrets
from pathlib import Path

import pytest

from conveyor.cli.demo import Site
from conveyor.domain import limits
from conveyor.sdk import ApiError, Client, RunResponse, SubmitJobRequest, TrioClient, Unreachable
from conveyor.sdk.errors import RetryPolicy
from tests.sdk.scripted import Answer, Scripted, problem

MISSING = 7


def _methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_trio_client_has_the_methods_of_the_synchronous_client() -> None:
    assert _methods(TrioClient) == _methods(Client)


async def test_a_client_whose_block_has_ended_sends_nothing(tmp_path: Path) -> None:
    async with TrioClient("http://127.0.0.1:1", "key") as client:
        pass

    with pytest.raises(RuntimeError, match="has been closed"):
        await client.get("job")
    with pytest.raises(RuntimeError, match="has been closed"):
        await client.download("job", "task", tmp_path / "page")
    with pytest.raises(RuntimeError, match="has been closed"):
        await client.download_all("job", {"task": tmp_path / "page"})


@pytest.mark.slow
async def test_a_job_is_submitted_finished_and_deleted(
    server: str, site: Site, tmp_path: Path
) -> None:
    seen: list[RunResponse] = []

    async with TrioClient(server, secrets.token_hex(8)) as client:
        job = await client.submit(site.urls(9), idempotency_key="once")
        again = await client.submit(site.urls(9), idempotency_key="once")
        run = await client.wait(job.job_id, seen.append, timeout_s=30)
        results = [result async for result in client.results(job.job_id)]
        good = [task_result.task_id for task_result in results if task_result.index != MISSING]
        bad = next(task_result.task_id for task_result in results if task_result.index == MISSING)
        saved = await client.download_all(
            job.job_id, {task_id: tmp_path / task_id for task_id in [*good, bad]}
        )
        body = await client.content(job.job_id, good[0])
        events = [event.type async for event in client.events()]
        await client.delete(job.job_id)

        with pytest.raises(ApiError, match="404 not_found"):
            await client.get(job.job_id)

    assert (again.job_id, seen[-1]) == (job.job_id, run)
    assert (run.stats.successful, run.stats.failed) == (8, 1)
    assert isinstance(saved[bad], ApiError)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(good)
    assert body == (tmp_path / good[0]).read_bytes()
    assert events == ["job.created", "run.created", "run.completed"]


@pytest.mark.slow
async def test_an_export_is_awaited_and_saved(server: str, site: Site, tmp_path: Path) -> None:
    target = tmp_path / "all.zip"

    async with TrioClient(server, secrets.token_hex(8)) as client:
        job = await client.submit(site.urls(3))
        run = await client.wait(job.job_id, timeout_s=30)
        started = await client.start_export(job.job_id, run.run_id)
        export = await client.wait_for_export(job.job_id, run.run_id, started.export_id)
        saved = await client.download_export(job.job_id, run.run_id, started.export_id, target)

    assert (export.status, saved.sha256) == ("completed", export.sha256)
    assert target.read_bytes()[:2] == b"PK"


@pytest.mark.slow
async def test_an_uploaded_list_becomes_a_job(server: str, site: Site, tmp_path: Path) -> None:
    lines = tmp_path / "urls.txt"
    lines.write_text("\n".join(site.urls(3)))

    async with TrioClient(server, secrets.token_hex(8)) as client:
        input_id = await client.upload(lines)
        job = await client.submit(SubmitJobRequest(file_input_id=input_id))
        run = await client.wait(job.job_id, timeout_s=30)

    assert run.stats.successful == 3


async def test_a_503_is_retried_and_an_unreachable_server_raises_unreachable(
    script: Scripted,
) -> None:
    script.answer_with(problem(503, "unavailable"), problem(404, "not_found"))
    quick = RetryPolicy(attempts_max=2, backoff_s=0.01)

    async with TrioClient(script.url, "k", retry=quick) as client:
        with pytest.raises(ApiError, match="404"):
            await client.get("01ARZ3NDEKTSV4RRFFQ69G5FAV")
    async with TrioClient("http://127.0.0.1:9", "k", retry=quick) as client:
        with pytest.raises(Unreachable):
            await client.get("01ARZ3NDEKTSV4RRFFQ69G5FAV")


async def test_an_export_of_any_size_is_saved_if_it_has_its_digest(
    script: Scripted, tmp_path: Path
) -> None:
    body = bytes(limits.BODY_BYTES_MAX + 1)
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    script.answer_with(Answer(200, body, {"ETag": tag}), Answer(200, b"other", {"ETag": tag}))
    once = RetryPolicy(attempts_max=1)
    names = ("01ARZ3NDEKTSV4RRFFQ69G5FAV",) * 3

    async with TrioClient(script.url, "k", retry=once) as client:
        saved = await client.download_export(*names, tmp_path / "all.zip")
        with pytest.raises(Unreachable, match="damaged"):
            await client.download_export(*names, tmp_path / "other.zip")

    assert saved.size_bytes == len(body) == (tmp_path / "all.zip").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["all.zip"]


async def test_requests_are_sent_through_a_proxy_of_the_environment(
    script: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", script.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    script.answer_with(
        Answer(202, b""),
        Answer(200, b"body"),
        problem(404, "result_not_found"),
        Answer(200, b"export"),
    )

    async with TrioClient("http://conveyor.test", "k") as client:
        await client.delete("job")
        saved = await client.download_all("job", {"a": tmp_path / "a"})
        with pytest.raises(ApiError, match="404 result_not_found"):
            await client.content("job", "b")
        await client.download_export("job", "run", "export", tmp_path / "export")

    assert not isinstance(saved["a"], ApiError)
    assert (tmp_path / "a").read_bytes() == b"body"
    assert (tmp_path / "export").read_bytes() == b"export"
    assert script.requests[0].path == "http://conveyor.test/v1/jobs/job"
    assert all(request.headers["x-api-key"] == "k" for request in script.requests)
