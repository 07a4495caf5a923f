"""LeaseHeartbeater: held work keeps its lease, message and claim, and work that lost one of them is
cancelled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio
from trio.testing import MockClock

from actors.lease_heartbeater import LeaseHeartbeater
from actors.messages import HeartbeaterMessage, Hold, Release
from actors.runtime import Address, Mailbox
from conveyor.domain import limits
from conveyor.domain.changes import TaskKey
from conveyor.domain.ids import LeaseId
from conveyor.domain.model import Task
from conveyor.domain.run.settlement import Claimed
from conveyor.ports.queue import Message
from conveyor.usecases.run import tasks
from tests.actors.faults import Faults, faulty
from tests.actors.world import World, make_world, urls


@asynccontextmanager
async def beating(world: World) -> AsyncGenerator[Address[HeartbeaterMessage], None]:
    mailbox: Mailbox[HeartbeaterMessage] = Mailbox(capacity=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LeaseHeartbeater(env=world.env).run, mailbox.open_inbox())
        yield mailbox.address
        nursery.cancel_scope.cancel()


async def held_work(world: World) -> tuple[LeaseId, Message, Task]:
    """One task that was received, leased and claimed."""
    accepted = await world.submit(urls(1))
    run = accepted.run
    (lease_id,) = await world.env.coordinator.acquire(
        run.job_id, run.run_id, count_max=1, cap=1, ttl_s=limits.LEASE_TTL_S
    )
    (message,) = await world.env.queue.receive(
        run.run_id, count_max=1, visibility_s=limits.VISIBILITY_S
    )
    claim = (await tasks.claim(world.env, [message.ref]))[0]
    assert isinstance(claim, Claimed)
    return lease_id, message, claim.task


async def test_held_work_keeps_lease_message_and_claim_for_hours(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)

    async with beating(world) as heartbeater:
        with trio.CancelScope() as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await trio.sleep(7_200)

    assert not work.cancelled_caught
    assert await world.env.coordinator.count(message.ref.run_id) == 1
    assert (await world.env.queue.depth(message.ref.run_id)).hidden == 1


async def test_work_that_lost_its_lease_is_cancelled(autojump_clock: MockClock) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)

    async with beating(world) as heartbeater:
        with trio.move_on_after(100) as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await world.env.coordinator.release([lease_id])
            await trio.sleep_forever()

    assert trio.current_time() < 2 * limits.HEARTBEAT_S


async def test_work_is_cancelled_when_its_message_was_redelivered_elsewhere(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)

    async with beating(world) as heartbeater:
        with trio.move_on_after(100) as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await world.env.queue.bounce([message], delay_s=0)
            await world.env.queue.receive(message.ref.run_id, count_max=1, visibility_s=60)
            await trio.sleep_forever()

    assert trio.current_time() < limits.VISIBILITY_S


async def test_work_whose_claim_was_taken_over_is_cancelled(autojump_clock: MockClock) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)

    async with beating(world) as heartbeater:
        with trio.move_on_after(100) as work:
            await heartbeater.tell(
                Hold(lease_id, message, msgspec.structs.replace(task, claim=9), work)
            )
            await trio.sleep_forever()

    assert trio.current_time() < limits.VISIBILITY_S


async def test_released_work_is_not_cancelled(autojump_clock: MockClock) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)

    async with beating(world) as heartbeater:
        with trio.move_on_after(100) as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await heartbeater.tell(Release(message.receipt))
            await world.env.coordinator.release([lease_id])
            await trio.sleep_forever()

    assert trio.current_time() == pytest.approx(100)


async def test_one_failed_heartbeat_loses_nothing(autojump_clock: MockClock) -> None:
    world = make_world()
    faults = Faults()
    lease_id, message, task = await held_work(world)
    faults.before["renew"] = 1
    faulted = replace(world.env, coordinator=faulty(world.env.coordinator, faults))

    async with beating(replace(world, env=faulted)) as heartbeater:
        with trio.move_on_after(100) as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await trio.sleep_forever()

    assert faults.fired["renew"] == 1
    assert trio.current_time() == pytest.approx(100)


async def test_a_missed_renewal_of_message_and_claim_costs_nothing(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    faults = Faults()
    lease_id, message, task = await held_work(world)
    faults.before["extend"] = 1
    faulted = replace(world.env, queue=faulty(world.env.queue, faults))

    async with beating(replace(world, env=faulted)) as heartbeater:
        with trio.move_on_after(200) as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await trio.sleep_forever()

    assert faults.fired["extend"] == 1
    assert trio.current_time() == pytest.approx(200)


async def test_work_that_ends_before_its_renewal_is_due_is_not_extended(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)
    before = await world.env.store.read(TaskKey.of(message.ref))

    async with beating(world) as heartbeater:
        await heartbeater.tell(Hold(lease_id, message, task, trio.CancelScope()))
        await trio.sleep(LeaseHeartbeater(env=world.env).due_s - 1)
        before_due = await world.env.store.read(TaskKey.of(message.ref))
        await trio.sleep(limits.HEARTBEAT_S)
        after = await world.env.store.read(TaskKey.of(message.ref))

    assert before is not None
    assert after is not None
    assert before_due == before
    assert after.claim_until > before.claim_until
    assert await world.env.coordinator.count(message.ref.run_id) == 1


def test_an_interval_that_is_too_long_for_the_lease_is_refused() -> None:
    with pytest.raises(AssertionError):
        LeaseHeartbeater(env=make_world().env, interval_s=limits.LEASE_TTL_S / 2)


async def test_work_survives_a_heartbeat_in_which_a_lease_that_it_passed_on_is_released(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    faults = Faults(latency_s={"renew": 1.0})
    lease_id, message, task = await held_work(world)
    slow = replace(world.env, coordinator=faulty(world.env.coordinator, faults))

    async with beating(replace(world, env=slow)) as heartbeater:
        with trio.move_on_after(100) as work:
            await heartbeater.tell(Hold(lease_id, message, task, work))
            await trio.sleep(limits.HEARTBEAT_S + 0.5)
            await heartbeater.tell(Hold(None, message, task, work))
            await world.env.coordinator.release([lease_id])
            await trio.sleep_forever()

    assert trio.current_time() == pytest.approx(100)


async def test_a_lease_that_was_passed_on_keeps_its_new_work_alive(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    lease_id, message, task = await held_work(world)
    _, next_message, next_task = await held_work(world)

    async with beating(world) as heartbeater:
        with trio.CancelScope() as work:
            await heartbeater.tell(Hold(lease_id, message, task, trio.CancelScope()))
            await heartbeater.tell(Hold(lease_id, next_message, next_task, work))
            await heartbeater.tell(Release(message.receipt))
            await trio.sleep(3_600)

    assert (await world.env.queue.depth(next_message.ref.run_id)).hidden == 1
    assert (await world.env.queue.depth(message.ref.run_id)).visible == 1
    assert not work.cancelled_caught


async def test_a_long_fetch_keeps_its_lease_its_message_and_its_claim(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=170)

    async with world.working():
        accepted = await world.submit(urls(5))
        _, totals = await world.wait_for_end(accepted, within_s=1_000)

    assert totals.successful == 5
    assert set(world.gateway.calls.values()) == {1}
