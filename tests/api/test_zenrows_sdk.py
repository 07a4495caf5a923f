"""The unmodified `zenrows` client against our server: its models read everything we answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from zenrows.batch import BatchAPIError, ZenRowsBatchClient

from tests.api.test_sockets import Server, served
from tests.api.world import ANNA, World

pytestmark = pytest.mark.slow


async def _with_sdk(server: Server, use: Callable[[Any], Any]) -> Any:
    def scenario() -> Any:
        with ZenRowsBatchClient(ANNA, base_url=f"{server.url}/v1") as client:
            return use(client)

    return await trio.to_thread.run_sync(scenario)


async def test_the_client_submits_watches_and_reads_results(world: World) -> None:
    async with served(world) as server:
        urls = ["https://example.com/1", {"url": "https://example.com/2", "external_id": "two"}]
        submitted = await _with_sdk(server, lambda client: client.submit_regular(urls))
        job_id = submitted.job_id
        (run,) = (await world.get(f"/v1/jobs/{job_id}/runs")).json["runs"]
        good, bad = await world.tasks_of(job_id, run["run_id"])
        await world.succeed(job_id, good, b"<p>one</p>")
        await world.fail(job_id, bad)

        def look(client: Any) -> list[Any]:
            job = client.job(job_id)
            rows = list(job.run.results(status="successful"))
            return [
                [each.job_id for each in client.list_jobs().jobs],
                job.run.load().status.value,
                [row.error.code for row in job.run.results(status="failed")],
                [job.run.download_task_to_memory(row) for row in rows],
                [len(job.run.task_history(row.task_id).events) for row in rows],
            ]

        seen = await _with_sdk(server, look)

    assert seen == [[job_id], "completed", ["target_not_found"], [b"<p>one</p>"], [1]]


async def test_the_client_reads_our_problems(world: World) -> None:
    async with served(world) as server:
        with pytest.raises(BatchAPIError) as caught:
            await _with_sdk(server, lambda client: client.submit_regular(["ftp://example.com/"]))

    problem: Any = caught.value.problem
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_argument")
    assert problem.extras["invalid_tasks"][0]["reason"] == "unsupported_scheme"


async def test_the_client_feeds_pauses_stops_reruns_and_deletes(world: World) -> None:
    def scenario(client: Any) -> list[Any]:
        job = client.submit_open(idempotency_key="once")
        job.add_tasks({"tasks": [{"url": "https://example.com/"}]})
        seen = [job.run.pause().data.pause_state.value, job.run.resume().status.value]
        seen += [job.close().status.value, job.run.stop().status.value]
        job.rerun()
        seen.append(job.run.load().status.value)
        job.delete()
        job.delete()
        return seen

    async with served(world) as server:
        seen = await _with_sdk(server, scenario)

    assert seen == ["paused", "running", "closed", "stopped", "running"]
