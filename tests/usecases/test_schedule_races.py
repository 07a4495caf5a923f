"""Schedules: concurrent schedulers, callers and outages."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from conveyor.domain.model import Job, RunStatus
from conveyor.domain.schedule import Overlap, Rate, RateUnit, ScheduleStatus
from conveyor.ports.errors import Unavailable
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.schedule import Fired
from tests.builders import CALLER, T0, ManualClock
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.run.test_rerun import start_rerun
from tests.usecases.scheduled import DAILY, HOUR, finish, row_of, runs_of, schedule


async def test_concurrent_schedulers_fire_once(env: Context, clock: ManualClock) -> None:
    for number in range(10):
        job = await schedule(env, Rate(1, RateUnit.HOUR, clock.at), number=900 + number)
        clock.advance(5.5 * HOUR)
        fired: list[Fired] = []

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(_fire, env, job, fired)

        assert fired.count(Fired.STARTED) == 1
        assert len(await runs_of(env, job)) == 1


async def _fire(env: Context, job: Job, fired: list[Fired]) -> None:
    fired.append(await schedules.trigger_schedule(env, job.job_id))


async def test_an_edit_concurrent_with_a_fire_happens_before_or_after_it(
    env: Context, clock: ManualClock
) -> None:
    orders = set()
    for number in range(40):
        job = await schedule(env, Rate(1, RateUnit.HOUR, clock.at), number=2_000 + number)
        clock.advance(HOUR)
        fired: list[Fired] = []
        rule = Rate(1, RateUnit.DAY, clock.at)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_fire, env, job, fired)
            for _ in range(number % 8):
                await trio.lowlevel.checkpoint()
            nursery.start_soon(schedules.replace, env, CALLER, job.job_id, rule, Overlap.SKIP)

        row = await row_of(env, job)
        assert (row.rule, row.next_fire_at) == (rule, clock.at + 24 * HOUR)
        assert len(await runs_of(env, job)) == fired.count(Fired.STARTED)
        assert row.version == 1 + fired.count(Fired.STARTED)
        orders.add(fired[0])
    assert orders == {Fired.STARTED, Fired.NOT_DUE}


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
async def test_a_fire_interrupted_at_any_call_creates_one_run(
    env: Context, clock: ManualClock, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job = await schedule(env, Rate(1, RateUnit.HOUR, clock.at), number=10_000 + at)
        nominal = clock.at + HOUR
        clock.advance(HOUR)
        fault = Fault(at, when)

        with suppress(Unavailable):
            await schedules.trigger_schedule(with_fault(env, fault), job.job_id)
        await schedules.trigger_schedule(env, job.job_id)

        (run,) = await runs_of(env, job)
        assert run.scheduled_for == nominal
        assert (await finish(env, run)).status is RunStatus.COMPLETED
        assert (await row_of(env, job)).next_fire_at == nominal + HOUR
        goes_on = fault.was_reached
    assert at > 4


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("count", [2, 120])
async def test_a_submit_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, clock: ManualClock, count: int, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        fault = Fault(at, when)

        with suppress(Unavailable):
            await schedule(with_fault(env, fault), DAILY, count=count, number=20_000 + at)
        job = await schedule(env, DAILY, count=count, number=20_000 + at)

        run = (await start_rerun(env, job)).run
        assert (await finish(env, run)).total == count
        assert (await row_of(env, job)).version == 0
        goes_on = fault.was_reached
    assert at > 2


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
async def test_an_edit_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, clock: ManualClock, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job = await schedule(env, number=30_000 + at)
        fault = Fault(at, when)
        struck = with_fault(env, fault)

        with suppress(Unavailable):
            await schedules.replace(struck, CALLER, job.job_id, DAILY, Overlap.QUEUE)
            await schedules.set_state(struck, CALLER, job.job_id, ScheduleStatus.PAUSED)
        await schedules.replace(env, CALLER, job.job_id, DAILY, Overlap.QUEUE)
        paused = await schedules.set_state(env, CALLER, job.job_id, ScheduleStatus.PAUSED)

        assert paused.schedule.version == 2
        assert paused.schedule.next_fire_at == T0 + 24 * HOUR
        goes_on = fault.was_reached
    assert at > 6


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
async def test_a_fire_by_hand_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job = await schedule(env, number=40_000 + at)
        fault = Fault(at, when)

        with suppress(Unavailable):
            await start_rerun(with_fault(env, fault), job, number=50_000 + at)
        started = await start_rerun(env, job, number=50_000 + at)

        (run,) = await runs_of(env, job)
        assert run.run_id == started.run.run_id
        assert (await finish(env, run)).status is RunStatus.COMPLETED
        goes_on = fault.was_reached
    assert at > 4
