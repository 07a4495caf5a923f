"""A complete worker while the system clock is set (SPEC.md 4.22)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.ids import JobId
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.domain.model import RunStatus
from conveyor.domain.queries import RunsOf
from conveyor.domain.schedule import Cron, Overlap
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases import schedule
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Submission
from tests.actors.world import CALLER, SetClock, World, make_world, urls, without_signals

HOUR_S, DAY_S = 3_600.0, 86_400.0
STEPS_S = (-40 * DAY_S, -DAY_S, -HOUR_S, HOUR_S, DAY_S, 40 * DAY_S)


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_a_run_whose_clock_is_set_ends_in_time_with_each_page_fetched_once(
    autojump_clock: MockClock, step_s: float
) -> None:
    clock = SetClock()
    world = make_world(think_s=2.0, clock=clock)
    async with world.working():
        accepted = await world.submit(urls(60), max_inflight=10)
        await trio.sleep(5)

        clock.offset_s += step_s
        run, totals = await world.wait_for_end(accepted, within_s=40)

    assert run.status is RunStatus.COMPLETED
    assert totals.successful == 60
    assert set(world.gateway.calls.values()) == {1}


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_a_long_fetch_is_not_interrupted_by_a_step_of_the_clock(
    autojump_clock: MockClock, step_s: float
) -> None:
    clock = SetClock()
    world = make_world(think_s=170.0, clock=clock)
    async with world.working():
        accepted = await world.submit(urls(3))
        await trio.sleep(40)

        clock.offset_s += step_s
        _, totals = await world.wait_for_end(accepted, within_s=180)

    assert totals.successful == 3
    assert set(world.gateway.calls.values()) == {1}


async def _nominal_times(world: World, job_id: JobId) -> list[float | None]:
    query = RunsOf(job_id=job_id, statuses=RUN_VISIBLE, limit=1_000)
    return [run.scheduled_for for run in reversed(await world.env.store.find(query))]


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [HOUR_S, 40 * DAY_S])
async def test_a_schedule_triggers_every_minute_while_the_clock_is_set_ahead_and_back(
    autojump_clock: MockClock, ahead_s: float
) -> None:
    clock = SetClock()
    world = make_world(clock=clock)
    async with world.working():
        request = Submission(drafts=[TaskDraft(url="https://example.com/")])
        accepted = await schedule.submit(
            world.env,
            CALLER,
            request,
            Cron("* * * * *", "UTC"),
            Overlap.SKIP,
            job_id=JobId(world.env.new_id()),
        )
        job_id = accepted.job.job_id
        counts = []
        for step_s in (0.0, ahead_s, -ahead_s):
            clock.offset_s += step_s
            before = len(await _nominal_times(world, job_id))
            await trio.sleep(300)
            counts.append(len(await _nominal_times(world, job_id)) - before)
        fired = await _nominal_times(world, job_id)

    assert all(4 <= count <= 6 for count in counts), counts
    assert len(set(fired)) == len(fired)


async def test_work_written_by_an_api_with_a_clock_that_is_ahead_is_done_on_time(
    autojump_clock: MockClock,
) -> None:
    """The API's machine has no worker that would notice when its clock is corrected (seed 317)."""
    api_clock = SetClock(offset_s=DAY_S)
    world = without_signals(make_world(clock=SetClock()))
    config = replace(world.env.config, at_once_max=1, sync_tasks_max=1)
    api = replace(world, env=replace(world.env, clock=api_clock, config=config))
    async with world.working():
        await trio.sleep(60)

        accepted = await api.submit(urls(10))
        unwanted = await api.submit(urls(2, host="example.org"))
        await jobs.delete(api.env, CALLER, unwanted.job.job_id)
        run, totals = await world.wait_for_end(accepted, within_s=900)

    assert run.status is RunStatus.COMPLETED
    assert totals.successful == 10
    assert await world.tasks(unwanted) == []
