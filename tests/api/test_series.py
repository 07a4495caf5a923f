"""The series of a run over HTTP, and its longest fetches."""

from __future__ import annotations

from dataclasses import replace

from conveyor.domain.ids import RunId
from conveyor.domain.run.wait_reason import OpenFetch, RunReport, WorkerReport
from conveyor.usecases.run import reconcile
from conveyor.usecases.run.run_progress import publish_presence, publish_reports
from tests.api.world import BERT, World


async def test_a_series_has_a_bucket_for_each_minute_and_adds_up(world: World) -> None:
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    good, bad, _ = await world.tasks_of(job_id, run_id)
    await world.succeed(job_id, good)
    world.clock.advance(60)
    await reconcile.sweep_runs(world.env)
    await world.fail(job_id, bad)
    world.clock.advance(60)

    buckets = (await world.get(f"/v1/jobs/{job_id}/runs/{run_id}/series")).json["buckets"]

    assert [(bucket["successful"], bucket["failed"]) for bucket in buckets] == [(1, 0), (0, 1)]
    assert [bucket["failure_reasons"] for bucket in buckets] == [{}, {"bad_target": 1}]
    assert [bucket["bytes"] for bucket in buckets] == [3, 0]
    assert [bucket["spend"]["credits"] for bucket in buckets] == [1, 0]
    assert buckets[0]["until"] == buckets[1]["since"]


async def test_a_foreign_series_is_not_found(world: World) -> None:
    job = await world.submit(3)
    path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/series"

    assert (await world.get(path, key=BERT)).status == 404


async def test_the_longest_fetches_come_first_with_their_age(world: World) -> None:
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    first, second, _ = await world.tasks_of(job_id, run_id)
    await world.claim(job_id, second)
    world.clock.advance(7)
    await world.claim(job_id, first)
    world.clock.advance(5)

    fetches = (await world.get(f"/v1/jobs/{job_id}/runs/{run_id}/fetches")).json["fetches"]

    assert [fetch["task_id"] for fetch in fetches] == [second.task_id, first.task_id]
    assert [fetch["age_s"] for fetch in fetches] == [12, 5]
    assert fetches[0]["url"] == second.url


async def test_of_a_long_run_the_reported_fetches_are_shown(world: World) -> None:
    env = replace(world.env, config=replace(world.env.config, rows_read_max=2))
    seen = world.seen_through(env)
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    first, second, ended = await world.tasks_of(job_id, run_id)
    for task in (first, second):
        await world.claim(job_id, task)
    await world.succeed(job_id, ended)
    reported = tuple(OpenFetch(task.task_id, env.now()) for task in (second, ended))
    await publish_presence(env, WorkerReport(5, 2))
    await publish_reports(env, {RunId(run_id): RunReport(oldest=reported)})

    fetches = (await seen.get(f"/v1/jobs/{job_id}/runs/{run_id}/fetches")).json["fetches"]

    assert [fetch["task_id"] for fetch in fetches] == [second.task_id]


async def test_an_ended_run_has_no_fetches(world: World) -> None:
    job = await world.submit(1)
    await world.finish(job)
    path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/fetches"

    assert (await world.get(path)).json == {"fetches": []}
    assert (await world.get(path, key=BERT)).status == 404
