"""A worker that is asked to stop: its work in flight ends, and no other work is begun."""

from __future__ import annotations

from dataclasses import replace

import trio
from trio.testing import MockClock

from actors.limiters.fair_limiter import FairLimiter
from actors.tree import Mailboxes
from tests.actors.world import make_world, urls


async def test_a_drained_worker_has_settled_its_tasks_and_holds_no_lease(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=20.0)

    async with world.working():
        accepted = await world.submit(urls(200))
        with trio.fail_after(30):
            while world.gateway.inflight_count < 50:
                await trio.sleep(0.1)
        await world.limiter.drain()
        leases = await world.engine.coordinator.count(accepted.run.run_id)

    calls_before = len(world.gateway.calls)
    settled = [task for task in await world.tasks(accepted) if task.result is not None]
    assert calls_before == len(settled) == 50
    assert leases == 0
    assert (await world.engine.queue.depth(accepted.run.run_id)).visible == 150


async def test_the_remaining_tasks_of_a_drained_worker_are_fetched_once_by_the_next(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=20.0)
    async with world.working():
        accepted = await world.submit(urls(120))
        await trio.sleep(5)
        await world.limiter.drain()

    heir = replace(world, mail=Mailboxes(), limiter=FairLimiter(capacity=50))
    async with heir.working():
        _, totals = await heir.wait_for_end(accepted)

    assert totals.successful == 120
    assert set(world.gateway.calls.values()) == {1}


async def test_idle_leases_of_a_draining_worker_are_released_while_fetches_continue(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=20.0)

    async with world.working(), trio.open_nursery() as nursery:
        first = await world.submit(urls(10))
        await trio.sleep(10)
        await world.submit(urls(10, "later.example"))
        await trio.sleep(1)
        nursery.start_soon(world.limiter.drain)
        await trio.sleep(12)

        held = await world.engine.coordinator.count(first.run.run_id)

        assert world.gateway.inflight_count == 10
        assert held == 0
