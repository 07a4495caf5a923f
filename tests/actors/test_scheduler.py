"""The scheduler in virtual time: on the minute, after days without a worker, during outages, and
with several workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from actors.scheduler import Scheduler
from conveyor.domain.changes import ScheduleKey
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.domain.model import Job, Run, RunStatus
from conveyor.domain.queries import RunsOf
from conveyor.domain.schedule import Cron, Overlap, Rate, RateUnit, Rule, Schedule
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.run import rerun, runs
from conveyor.usecases.submit.jobs import Submission
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, World, make_world, urls

EVERY_MINUTE = Cron("* * * * *", "Europe/Berlin")


async def schedule(
    world: World, rule: Rule = EVERY_MINUTE, overlap: Overlap = Overlap.SKIP, *, count: int = 2
) -> Job:
    request = Submission(drafts=[TaskDraft(url=url) for url in urls(count)])
    job_id = JobId(world.env.new_id())
    accepted = await schedules.submit(world.env, CALLER, request, rule, overlap, job_id=job_id)
    return accepted.job


async def runs_of(env: Context, job: Job) -> list[Run]:
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, limit=1_000)
    return (await env.store.find(query))[::-1]


async def row_of(env: Context, job: Job) -> Schedule:
    row = await env.store.read(ScheduleKey(job.job_id))
    assert row is not None
    return row


def nominal(all_runs: list[Run]) -> list[float | None]:
    return [run.scheduled_for for run in all_runs]


def minutes_from(first: float, count: int) -> list[float]:
    return [first + 60 * number for number in range(count)]


async def test_a_worker_fires_every_nominal_time_and_completes_each_run(
    autojump_clock: MockClock,
) -> None:
    world = make_world()

    async with world.working():
        job = await schedule(world)
        first = (await row_of(world.env, job)).next_fire_at
        await trio.sleep(10 * 60)

    all_runs = await runs_of(world.env, job)
    assert first is not None
    assert nominal(all_runs) == minutes_from(first, 10)
    assert {run.status for run in all_runs} == {RunStatus.COMPLETED}
    assert all(0 <= run.created_at - (run.scheduled_for or 0) < 0.5 for run in all_runs)
    assert set(world.gateway.calls.values()) == {10}


async def test_a_time_before_the_next_query_is_not_missed(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    patient = Scheduler(env=world.env, period_s=3600)
    job = await schedule(world)
    other = await schedule(world, Rate(1, RateUnit.DAY, 1_700_000_000.0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(patient.run)
        await trio.sleep(61)
        nursery.cancel_scope.cancel()

    (run,) = await runs_of(world.env, job)
    assert run.created_at == pytest.approx(run.scheduled_for)
    assert await runs_of(world.env, other) == []


async def test_after_days_without_a_worker_one_run_makes_up_for_all_missed_times(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    job = await schedule(world)
    first = (await row_of(world.env, job)).next_fire_at
    await trio.sleep(3 * 86400)
    back_at = world.env.now()

    async with world.working():
        await trio.sleep(90)

    assert first is not None
    late, *on_time = nominal(await runs_of(world.env, job))
    assert late == first
    assert all(at is not None and at > back_at for at in on_time)
    assert 1 <= len(on_time) <= 2
    (skip,) = (await row_of(world.env, job)).skips
    assert (skip.first_at, skip.reason) == (first + 60, "missed")


async def test_a_schedule_skips_or_queues_a_fire_while_a_slow_run_is_live(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=150)

    async with world.working():
        yields = await schedule(world)
        waits = await schedule(world, overlap=Overlap.QUEUE)
        first = (await row_of(world.env, yields)).next_fire_at
        await trio.sleep(10 * 60)

    assert first is not None
    yielded = await runs_of(world.env, yields)
    assert nominal(yielded) == [first + 180 * number for number in range(len(yielded))]
    assert len(yielded) == 4
    waited = await runs_of(world.env, waits)
    assert all(then.created_at - (ended.ended_at or 0) < 2 for ended, then in pairwise(waited))
    assert len(waited) >= 4


async def test_schedules_that_wait_do_not_delay_others(autojump_clock: MockClock) -> None:
    world = make_world()
    held = [await schedule(world, overlap=Overlap.QUEUE) for _ in range(7)]
    for job in held:
        run_id = RunId(world.env.new_id())
        await rerun.rerun(world.env, CALLER, job.job_id, retry=None, run_id=run_id)
    await trio.sleep(60)
    job = await schedule(world)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scheduler(env=world.env, page_rows=3).run)
        await trio.sleep(61)
        nursery.cancel_scope.cancel()

    assert len(await runs_of(world.env, job)) == 1
    assert {len(await runs_of(world.env, held_job)) for held_job in held} == {1}


async def test_a_stopped_run_does_not_stop_the_schedule(autojump_clock: MockClock) -> None:
    world = make_world(think_s=1_000)

    async with world.working():
        job = await schedule(world)
        await trio.sleep(61)
        await runs.stop(world.env, CALLER, job.job_id)
        await trio.sleep(60)

    first, second = await runs_of(world.env, job)
    assert (first.status, second.status) == (RunStatus.STOPPED, RunStatus.RUNNING)


async def test_a_schedule_that_cannot_be_read_does_not_delay_others(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    bad = await schedule(world)
    row = await row_of(world.env, bad)
    gone = msgspec.structs.replace(row, rule=Cron("* * * * *", "Europe/Atlantis"))
    world.engine.store._schedules[(bad.job_id,)] = gone
    good = await schedule(world)

    async with world.working():
        await trio.sleep(121)

    assert await runs_of(world.env, bad) == []
    assert len(await runs_of(world.env, good)) >= 2


async def test_an_outage_delays_a_fire_and_neither_loses_nor_repeats_it(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=0.1)
    faults = Faults()
    env = replace(world.env, store=faulty(world.env.store, faults))
    world = replace(world, env=env)

    async with world.working():
        job = await schedule(world)
        first = (await row_of(world.env, job)).next_fire_at
        for _ in range(5):
            for method in ("commit", "read", "find"):
                faults.before[method] += 2
                faults.after[method] += 2
            await trio.sleep(60)
        await trio.sleep(60)

    all_runs = await runs_of(world.env, job)
    row = await row_of(world.env, job)
    assert first is not None
    skipped = sum(int((skip.until - skip.first_at) // 60) + 1 for skip in row.skips)
    assert len(all_runs) + skipped == ((row.next_fire_at or 0) - first) / 60
    assert len(set(nominal(all_runs))) == len(all_runs)
    assert faults.fired.total() >= 20


@pytest.mark.parametrize("seed", range(5))
async def test_two_schedulers_fire_each_nominal_time_exactly_once(
    autojump_clock: MockClock, seed: int
) -> None:
    world = make_world()
    slow: dict[str, Any] = {"read": 0.01 * (seed + 1), "find": 0.05, "commit": 0.02 * seed}
    others = [
        replace(world.env, store=faulty(world.env.store, Faults(latency_s=latency)))
        for latency in (slow, {"read": 0.013, "commit": 0.031}, {})
    ]
    accepted = [await schedule(world) for _ in range(5)]
    first = (await row_of(world.env, accepted[0])).next_fire_at

    async with world.working(), trio.open_nursery() as nursery:
        for env in others:
            nursery.start_soon(Scheduler(env=env).run)
        await trio.sleep(20 * 60)
        nursery.cancel_scope.cancel()

    assert first is not None
    for job in accepted:
        all_runs = await runs_of(world.env, job)
        assert nominal(all_runs) == minutes_from(first, 20)
        assert (await row_of(world.env, job)).skips == ()
    assert Counter(world.gateway.calls.values()) == {5 * 20: 2}
