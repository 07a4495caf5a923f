"""The unmodified `zenrows` client against our server: its models read everything we answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import trio
from zenrows.batch import (
    At,
    BatchAPIError,
    Calendar,
    Daily,
    Monthly,
    Rate,
    Weekly,
    ZenRowsBatchClient,
)

from conveyor.domain.ids import JobId
from conveyor.sdk.downloads import verify_export
from conveyor.usecases import export as exports
from conveyor.usecases import schedule
from tests.api.server.test_sockets import Server, served
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
                [listed_job.job_id for listed_job in client.list_jobs().jobs],
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


async def test_the_client_schedules_changes_pauses_and_fires(world: World) -> None:
    urls = ["https://example.com/1", "https://example.com/2"]
    soon = datetime(2024, 1, 2, 3, 0)  # noqa: DTZ001 (the client wants it so)

    def scenario(client: Any) -> list[Any]:
        at = client.submit_scheduled(At(soon, timezone="Europe/Berlin"), urls)
        raw = client.submit_scheduled({"at": soon, "timezone": "UTC"}, urls)
        job = client.submit_scheduled(Rate(every=15, unit="minute"), urls, name="Often")
        first = job.load()
        weekly = Calendar(["09:00", "18:00"], Weekly(["mon", "fri"]), "Europe/Berlin")
        monthly = Calendar(["09:00"], Monthly([1, 31]), "UTC")
        updated = [job.schedule.update(rule).data.schedule for rule in (weekly, monthly)]
        daily = job.schedule.update(Calendar(["00:00"], Daily(), "UTC")).data
        states = [job.schedule.pause(), job.schedule.pause(), job.schedule.resume()]
        fired = job.rerun()
        return [
            [handle.load().data.next_scheduled_run.isoformat() for handle in (at, raw)],
            (first.data.type.value, first.data.name, first.data.latest_run),
            (first.data.schedule.rate.every, first.data.schedule.rate.unit.value),
            [schedule_view.timezone for schedule_view in updated],
            [day.value for day in updated[0].calendar.cadence.weekly.days],
            [day.root for day in updated[1].calendar.cadence.monthly.days],
            daily.schedule.calendar.cadence.daily,
            [state.data.schedule_state.value for state in states],
            fired.data.trigger.value,
            [listed_job.job_id for listed_job in client.list_jobs(job_type="scheduled").jobs]
            == [job.job_id, raw.job_id, at.job_id],
        ]

    async with served(world) as server:
        seen = await _with_sdk(server, scenario)

    assert seen == [
        ["2024-01-02T02:00:00+00:00", "2024-01-02T03:00:00+00:00"],
        ("scheduled", "Often", None),
        (15, "minute"),
        ["Europe/Berlin", "UTC"],
        ["mon", "fri"],
        [1, 31],
        {},
        ["paused", "paused", "active"],
        "manual",
        True,
    ]


async def test_the_client_sees_a_fired_run_and_is_refused_what_a_schedule_does_not_take(
    world: World,
) -> None:
    codes = ["job_not_open", "job_not_open", "run_not_stoppable", "no_prior_run", "conflict"]

    def refusals(client: Any, job_id: str, regular_id: str) -> list[str]:
        job = client.job(job_id)
        calls = [
            lambda: job.add_tasks({"tasks": [{"url": "https://example.com/"}]}),
            job.close,
            job.run.stop,
            job.retry_failed,
            client.job(regular_id).schedule.pause,
        ]
        seen = []
        for call in calls:
            with pytest.raises(BatchAPIError) as caught:
                call()
            seen.append(caught.value.code)
        return seen

    async with served(world) as server:
        submitted = await _with_sdk(
            server,
            lambda client: client.submit_scheduled(
                Rate(every=1, unit="hour"), ["https://example.com/"], idempotency_key="once"
            ),
        )
        job_id = submitted.job_id
        regular = await world.submit(1)
        refused = await _with_sdk(
            server, lambda client: refusals(client, job_id, regular["job_id"])
        )
        world.clock.advance(3600)
        await schedule.trigger_schedule(world.env, JobId(job_id))
        run = await _with_sdk(server, lambda client: client.job(job_id).load().data.latest_run)

    assert refused == codes
    assert (run.trigger.value, run.status.value) == ("scheduled", "running")


async def test_the_client_exports_a_run_and_saves_the_archive(world: World, tmp_path: Path) -> None:
    job = await world.submit(3)
    await world.finish(job)
    ids = (job["job_id"], job["latest_run"]["run_id"])
    target = tmp_path / "below" / "all.zip"

    async def see_to_exports() -> None:
        while not (due := await exports.due(world.env, limit=1)):
            await trio.sleep(0.01)
        await exports.process(world.env, due[0])

    def save(client: Any) -> Any:
        return client.download_all_results(*ids, target, poll_interval=0.01)

    async with served(world) as server, trio.open_nursery() as nursery:
        nursery.start_soon(see_to_exports)
        saved = await _with_sdk(server, save)

    manifest = verify_export(saved)
    assert manifest.counts == {"successful": 3}


async def test_the_client_is_told_why_an_export_failed(world: World, tmp_path: Path) -> None:
    job = await world.submit(1)
    await world.finish(job)
    ids = (job["job_id"], job["latest_run"]["run_id"])
    await world.env.blobs.delete_prefix(f"jobs/{ids[0]}/runs")
    started = (await world.post(f"/v1/jobs/{ids[0]}/runs/{ids[1]}/exports")).json
    for _ in range(6):
        for export in await exports.due(world.env, limit=1):
            await exports.process(world.env, export)
        world.clock.advance(300)

    async with served(world) as server:
        seen = await _with_sdk(
            server, lambda client: client.get_results_export(*ids, started["export_id"]).data
        )

    assert seen.status.value == "failed"
    assert re.fullmatch(r"the stored body of task [0-9a-f]{32} is missing", seen.error)


async def test_the_client_skips_results_that_have_expired(world: World, tmp_path: Path) -> None:
    job = await world.submit(2, result_ttl_days=1)
    await world.finish(job)
    world.clock.advance(86_400)
    skipped: list[str] = []

    def save(client: Any) -> Any:
        run = client.job(job["job_id"]).run
        return run.download_to_dir(tmp_path, on_skip=lambda row: skipped.append(row.status.value))

    async with served(world) as server:
        saved = await _with_sdk(server, save)

    assert (saved, skipped) == (0, ["expired", "expired"])
