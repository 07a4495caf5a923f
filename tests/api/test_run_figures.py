"""`/metrics` tells what waits, and a probe leaves no log line."""

from __future__ import annotations

import logging

import pytest

from tests.api.world import World


def value(text: str, name: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[-1])


async def test_metrics_tell_what_waits_and_for_how_long(world: World) -> None:
    first = await world.submit(3)
    await world.submit(2)
    (task, *_) = await world.tasks_of(first["job_id"], first["latest_run"]["run_id"])
    await world.succeed(first["job_id"], task)
    await world.post(f"/v1/jobs/{first['job_id']}/pause")
    world.clock.advance(90)

    text = (await world.get("/metrics")).body.decode()

    assert value(text, 'conveyor_tasks_unfinished{state="pending"}') == 4
    assert value(text, 'conveyor_runs_live{state="running"}') == 1
    assert value(text, 'conveyor_runs_live{state="paused"}') == 1
    assert value(text, "conveyor_tasks_oldest_waiting_seconds") == 90


async def test_nothing_is_oldest_where_nothing_waits(world: World) -> None:
    text = (await world.get("/metrics")).body.decode()

    assert value(text, "conveyor_tasks_oldest_waiting_seconds") == 0


async def test_no_sample_says_when_a_counter_was_created(world: World) -> None:
    await world.submit()

    assert "_created" not in (await world.get("/metrics")).body.decode()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_a_probe_is_not_logged(
    world: World, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    await world.get(path)
    await world.get("/v1/jobs")

    routes = [record.route for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert routes == ["/v1/jobs"]


async def test_the_life_of_a_run_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    job = await world.submit()
    await world.post(f"/v1/jobs/{job['job_id']}/pause")
    await world.post(f"/v1/jobs/{job['job_id']}/resume")
    await world.finish(job)
    stopped = await world.submit()
    await world.post(f"/v1/jobs/{stopped['job_id']}/stop")
    run = f"/v1/jobs/{stopped['job_id']}/runs/{stopped['latest_run']['run_id']}"
    await world.call("DELETE", run)
    await world.call("DELETE", f"/v1/jobs/{job['job_id']}")

    lines = [
        record.message
        for record in caplog.records
        if record.message.startswith(("run ", "job ")) and not record.message.endswith("created")
    ]
    assert lines == [
        "run started",
        "run paused",
        "run resumed",
        "run completed",
        "run started",
        "run stopped",
        "run deleted",
        "job deleted",
    ]


async def test_no_pattern_of_the_document_looks_ahead(world: World) -> None:
    assert b"(?" not in (await world.get("/openapi.json")).body
