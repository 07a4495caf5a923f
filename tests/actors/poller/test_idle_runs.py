"""An open run whose tasks have all ended costs next to nothing, and wakes when a list is added."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from conveyor.domain.ids import BatchId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.world import World, make_world, urls

IDLE_S = 600.0


async def _open_job(world: World) -> Accepted:
    accepted = await world.submit(urls(3), is_open=True)
    await trio.sleep(30)
    return accepted


def _receive_count(world: World) -> float:
    return world.metrics.registry.get_sample_value("conveyor_queue_receives_total") or 0.0


async def test_an_idle_open_run_is_polled_at_most_twice_a_minute(autojump_clock: MockClock) -> None:
    world = make_world()
    async with world.working():
        await _open_job(world)
        before = _receive_count(world)
        await trio.sleep(IDLE_S)
        more_count = _receive_count(world) - before

    assert more_count <= IDLE_S / 30


async def test_an_idle_open_run_starts_at_once_on_a_list_that_is_added(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    async with world.working():
        accepted = await _open_job(world)
        await trio.sleep(IDLE_S)
        calls_before = world.gateway.calls.total()
        await jobs.add_tasks(
            world.env,
            accepted.job.caller,
            accepted.job.job_id,
            [TaskDraft(url=url) for url in urls(2, "more.example.com")],
            is_last=False,
            batch_id=BatchId(world.env.new_id()),
        )
        await trio.sleep(0.5)

        assert world.gateway.calls.total() == calls_before + 2
