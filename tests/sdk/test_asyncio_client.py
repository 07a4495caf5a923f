"""The asyncio client: it has the methods of the others and runs on the caller's event loop."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import secrets
from pathlib import Path

import pytest

from conveyor.cli.demo import Site
from conveyor.sdk import ApiError, AsyncioClient, RunResponse, TrioClient, Unreachable
from conveyor.sdk.errors import RetryPolicy
from tests.sdk.scripted import Answer, Scripted, problem

MISSING = 7
JOB_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
QUICK = RetryPolicy(attempts_max=2, backoff_s=0.01)


def _methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_asyncio_client_has_the_methods_of_the_trio_client() -> None:
    assert _methods(AsyncioClient) == _methods(TrioClient)


@pytest.mark.slow
def test_a_job_is_submitted_finished_and_deleted(server: str, site: Site, tmp_path: Path) -> None:
    seen: list[RunResponse] = []

    async def use() -> None:
        async with AsyncioClient(server, secrets.token_hex(8)) as client:
            job = await client.submit(site.urls(9), idempotency_key="once")
            again = await client.submit(site.urls(9), idempotency_key="once")
            run = await client.wait(job.job_id, seen.append, timeout_s=30)
            results = [result async for result in client.results(job.job_id)]
            good = [result.task_id for result in results if result.index != MISSING]
            bad = next(result.task_id for result in results if result.index == MISSING)
            saved = await client.download_all(
                job.job_id, {task_id: tmp_path / task_id for task_id in [*good, bad]}
            )
            body = await client.content(job.job_id, good[0])
            await client.download(job.job_id, good[1], tmp_path / "one")
            await client.delete(job.job_id)
            with pytest.raises(ApiError, match="404 not_found"):
                await client.get(job.job_id)

        assert (again.job_id, seen[-1]) == (job.job_id, run)
        assert (run.stats.successful, run.stats.failed) == (8, 1)
        assert isinstance(saved[bad], ApiError)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*good, "one"])
        assert body == (tmp_path / good[0]).read_bytes()
        assert (tmp_path / "one").read_bytes() == (tmp_path / good[1]).read_bytes()

    asyncio.run(use())


@pytest.mark.slow
def test_an_uploaded_list_is_exported(server: str, site: Site, tmp_path: Path) -> None:
    lines, target = tmp_path / "urls.txt", tmp_path / "all.zip"
    lines.write_text("\n".join(site.urls(3)))

    async def use() -> None:
        async with AsyncioClient(server, secrets.token_hex(8)) as client:
            job = await client.submit({"file_input_id": await client.upload(lines)})
            run = await client.wait(job.job_id, timeout_s=30)
            started = await client.start_export(job.job_id, run.run_id)
            export = await client.wait_for_export(job.job_id, run.run_id, started.export_id)
            saved = await client.download_export(job.job_id, run.run_id, started.export_id, target)

        assert run.stats.successful == 3
        assert (export.status, saved.sha256) == ("completed", export.sha256)
        assert target.read_bytes()[:2] == b"PK"

    asyncio.run(use())


def test_a_503_is_retried_and_an_unreachable_server_raises_unreachable(script: Scripted) -> None:
    script.answer_with(problem(503, "unavailable"), problem(404, "not_found"))

    async def use() -> None:
        async with AsyncioClient(script.url, "k", retry=QUICK) as client:
            with pytest.raises(ApiError, match="404"):
                await client.get(JOB_ID)
        async with AsyncioClient("http://127.0.0.1:9", "k", retry=QUICK) as client:
            with pytest.raises(Unreachable):
                await client.get(JOB_ID)

    asyncio.run(use())


def test_a_redirect_to_another_server_carries_no_key(script: Scripted, tmp_path: Path) -> None:
    body = b"page"
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    script.answer_with(
        Answer(302, b"", {"Location": f"http://localhost:{script.port}/stored"}),
        Answer(200, body, {"ETag": tag}),
    )

    async def use() -> None:
        async with AsyncioClient(script.url, "secret") as client:
            await client.download(JOB_ID, "t1", tmp_path / "page")

    asyncio.run(use())

    first, second = script.requests
    assert first.headers.get("x-api-key") == "secret"
    assert "x-api-key" not in second.headers
    assert (tmp_path / "page").read_bytes() == body


def test_a_damaged_body_leaves_no_file(script: Scripted, tmp_path: Path) -> None:
    script.answer_with(*[Answer(200, b"other", {"ETag": f'"{"0" * 64}"'})] * 2)

    async def use() -> None:
        async with AsyncioClient(script.url, "k", retry=QUICK) as client:
            with pytest.raises(Unreachable, match="damaged"):
                await client.download(JOB_ID, "t1", tmp_path / "page")

    asyncio.run(use())

    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_download_of_many_files_ends_and_leaves_no_part(
    script: Scripted, tmp_path: Path
) -> None:
    """The scripted server has no answers, so every download is retried."""

    async def use() -> None:
        async with AsyncioClient(script.url, "k") as client:
            paths = {f"t{number}": tmp_path / f"t{number}" for number in range(3)}
            download = asyncio.create_task(client.download_all(JOB_ID, paths))
            while not script.requests:
                await asyncio.sleep(0.01)
            download.cancel()
            with pytest.raises(asyncio.CancelledError):
                await download

    asyncio.run(use())

    assert list(tmp_path.iterdir()) == []
