"""An open run without unfinished tasks is polled rarely, and starts at once when a list is
added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trio
from trio.testing import MockClock

from actors.poller.poller import RECEIVED_ALL_S
from conveyor.domain.ids import BatchId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.world import World, a_miss, a_page, make_world, urls

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


async def test_an_idle_open_run_starts_at_once_when_a_list_is_added(
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


def _a_billed_world(**fields: Any) -> World:
    world = make_world(**fields)
    config = replace(world.env.config, shares_runs=True)
    return replace(world, env=replace(world.env, config=config))


async def test_a_run_all_of_whose_messages_were_received_is_not_polled_until_it_ends(
    autojump_clock: MockClock,
) -> None:
    world = _a_billed_world(think_s=30.0)
    async with world.working() as supervisor:
        accepted = await world.submit(urls(5))
        await world.wait_for_end(accepted)
        received = _receive_count(world)
        await trio.sleep(RECEIVED_ALL_S)
        pollers = world.pollers(supervisor)

    # One receive returns all messages, one is empty, and each later one follows a read of the run's
    # row.
    assert received <= 2 + 30 / RECEIVED_ALL_S
    assert _receive_count(world) == received
    assert pollers == []


async def test_tasks_that_are_retried_are_received_when_they_are_due(
    autojump_clock: MockClock,
) -> None:
    world = _a_billed_world(
        script=lambda request, attempt: a_miss() if attempt == 1 else a_page(), think_s=0.1
    )
    plain = make_world(script=world.gateway.script, think_s=0.1)
    took_s = []
    for each in (world, plain):
        async with each.working():
            began_at = trio.current_time()
            accepted = await each.submit(urls(8), max_attempts=2)
            _, totals = await each.wait_for_end(accepted)
            took_s.append(trio.current_time() - began_at)
            assert totals.successful == 8

    assert took_s[0] <= took_s[1] + 3.0


async def test_a_message_that_another_worker_lost_is_received(
    autojump_clock: MockClock,
) -> None:
    world = _a_billed_world(think_s=1.0)
    accepted = await world.submit(urls(3))
    await world.env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=25.0)
    async with world.working():
        began_at = trio.current_time()
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 3
    assert trio.current_time() - began_at < 25 + RECEIVED_ALL_S + 2
