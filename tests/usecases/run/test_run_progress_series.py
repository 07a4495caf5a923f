"""Samples of live runs, taken by the sweeper, and the time series made of them."""

from __future__ import annotations

from conveyor.domain.model import CounterSample, Run
from conveyor.domain.queries import SamplesOf
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import reconcile, run_progress, runs
from tests.builders import CALLER, ManualClock
from tests.usecases.world import run_of, submit, with_config, work


async def successful_by_bucket(env: Context, run: Run) -> list[int]:
    """The successful tasks of each bucket."""
    now = await run_of(env, run)
    buckets = await run_progress.load_series(env, now, await totals_of(env, run))
    return [bucket.successful for bucket in buckets]


async def samples_of(env: Context, run: Run) -> list[CounterSample]:
    return await env.store.find(SamplesOf(job_id=run.job_id, run_id=run.run_id, limit=100))


async def test_the_sweeper_samples_a_live_run_once_a_minute(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 30)
    for count in (10, 5, 1):
        await work(env, accepted.run, count=count)
        clock.advance(60)
        await reconcile.sweep_runs(env)
        await reconcile.sweep_runs(env)

    clock.advance(10)
    assert await successful_by_bucket(env, accepted.run) == [10, 5, 1, 0]
    await work(env, accepted.run)
    assert await successful_by_bucket(env, accepted.run) == [10, 5, 1, 14]


async def test_a_run_without_progress_is_not_sampled(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, 30)
    for _ in range(5):
        clock.advance(60)
        await reconcile.sweep_runs(env)

    assert await samples_of(env, accepted.run) == []


async def test_with_billed_calls_a_sample_needs_a_hundred_tasks(
    env: Context, clock: ManualClock
) -> None:
    env = with_config(env, sample_tasks_min=100)
    accepted = await submit(env, 250)
    for _ in range(5):
        await work(env, accepted.run, count=40)
        clock.advance(60)
        await reconcile.sweep_runs(env)

    assert [sample.successful for sample in await samples_of(env, accepted.run)] == [120]


async def test_a_sample_that_loses_a_race_changes_nothing(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, 30)
    await work(env, accepted.run, count=10)
    clock.advance(60)
    before = await run_of(env, accepted.run)
    await run_progress.store_sample(env, before, await totals_of(env, before))
    clock.advance(60)

    await run_progress.store_sample(env, before, await totals_of(env, before))

    assert len(await samples_of(env, accepted.run)) == 1


async def test_a_deleted_run_has_no_samples_and_gets_none(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, 30)
    await work(env, accepted.run, count=10)
    clock.advance(60)
    await reconcile.sweep_runs(env)
    before = await run_of(env, accepted.run)
    totals = await totals_of(env, before)
    await runs.delete_run(env, CALLER, accepted.job.job_id, accepted.run.run_id)
    await reconcile.delete_due(env)
    clock.advance(60)

    await run_progress.store_sample(env, before, totals)

    assert await samples_of(env, accepted.run) == []
