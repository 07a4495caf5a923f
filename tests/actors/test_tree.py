"""The complete worker: runs end, a stop releases work in order, and crashes are survived."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from actors.runtime import Supervisor
from conveyor.domain.model import (
    RunStatus,
    TaskStatus,
)
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, make_world, urls


async def test_every_task_of_a_run_is_fetched_once_and_settled(autojump_clock: MockClock) -> None:
    world = make_world()

    async with world.working():
        accepted = await world.submit(urls(200))
        run, totals = await world.wait_for_end(accepted)

    assert run.status is RunStatus.COMPLETED
    assert (totals.done, totals.successful) == (200, 200)
    assert set(world.gateway.calls.values()) == {1}
    assert (await world.engine.queue.depth(run.run_id)).visible == 0


async def test_a_stop_ends_the_work_and_releases_everything(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50, think_s=3_600)

    async with world.working() as supervisor:
        accepted = await world.submit(urls(200))
        await trio.sleep(1)
        assert world.gateway.inflight_count == 50
        stopped = await runs.stop(world.env, CALLER, accepted.job.job_id)

        assert stopped.run.status is RunStatus.STOPPED
        assert stopped.receipt.complete
        assert world.gateway.inflight_count == 0
        assert await world.engine.coordinator.count(accepted.run.run_id) == 0
        assert world.pollers(supervisor) == []
        rows = await world.tasks(accepted)
        assert {row.status for row in rows} == {TaskStatus.PENDING}
        assert {row.attempts for row in rows} == {0}
        await trio.sleep(600)
        assert await world.tasks(accepted) == rows


async def test_work_in_flight_at_shutdown_is_released_and_finished_by_the_next_worker(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=20, think_s=10)

    async with world.working():
        accepted = await world.submit(urls(30))
        await trio.sleep(5)
        assert world.gateway.inflight_count == 20

    assert world.gateway.inflight_count == 0
    assert {row.status for row in await world.tasks(accepted)} == {TaskStatus.PENDING}
    assert await world.engine.coordinator.count(accepted.run.run_id) == 0
    async with world.working():
        _, totals = await world.wait_for_end(accepted)
    assert totals.successful == 30


@pytest.mark.parametrize("count", [0, 1, 89, 90, 91, 1_000, 1_001, 2_500])
async def test_all_tasks_of_lists_of_any_length_are_done(
    autojump_clock: MockClock, count: int
) -> None:
    world = make_world(capacity=200, think_s=0)

    async with world.working():
        accepted = await world.submit(urls(count), is_open=count == 0)
        if count == 0:
            await jobs.close(world.env, CALLER, accepted.job.job_id)
        run, totals = await world.wait_for_end(accepted)

    assert run.status is RunStatus.COMPLETED
    assert totals.successful == run.total == run.planned == count


def restarts(supervisor: Supervisor, name: str) -> int:
    (record,) = [record for record in supervisor.records() if record.child.name == name]
    return record.restart_count


async def test_an_outage_of_the_store_delays_a_run_and_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1, capacity=5)
    faults = Faults()
    world = replace(
        world,
        env=replace(
            world.env,
            store=faulty(world.env.store, faults),
            queue=faulty(world.env.queue, faults),
        ),
    )

    async with world.working():
        accepted = await world.submit(urls(60))
        for _ in range(8):
            await trio.sleep(1.3)
            for method in ("commit", "receive", "ack", "find"):
                faults.before[method] += 1
                faults.after[method] += 1
        run, totals = await world.wait_for_end(accepted, within_s=900)

    rows = await world.tasks(accepted)
    assert run.status is RunStatus.COMPLETED
    assert totals.done == totals.successful == len(rows) == 60
    assert {row.status for row in rows} == {TaskStatus.SUCCESSFUL}
    assert faults.fired.total() > 20


async def test_a_crash_of_the_heartbeater_restarts_the_actors_that_depend_on_it(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=5)

    async with world.working() as supervisor:
        accepted = await world.submit(urls(30))
        await trio.sleep(2)
        world.mail.heartbeater.address.tell_nowait(None)  # type: ignore[arg-type]
        _, totals = await world.wait_for_end(accepted, within_s=600)
        assert restarts(supervisor, "lease_heartbeater") == 1
        assert restarts(supervisor, "queue_discovery") == 1

    assert totals.successful == 30
