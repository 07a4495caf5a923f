"""Permit and PermitPool: the parts of a permit are taken together and released together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.limiters.storage_breaker import StorageBreaker
from actors.poller.permit import BudgetReservations, NoPermit, Permit, PermitPool, Wakeup
from conveyor.domain.budget import BudgetCap, Price, Unit
from conveyor.domain.ids import RunId
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.coordinator import HostPool
from conveyor.ports.errors import Unavailable
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.faults import Faults, faulty
from tests.actors.world import World, make_world, urls

CAP = 3


async def a_pool(world: World, accepted: Accepted, *, faults: Faults | None = None) -> PermitPool:
    env, run = world.env, accepted.run
    if faults is not None:
        env = replace(env, coordinator=faulty(env.coordinator, faults))
    reservations = None
    if run.budget is not None:
        reservations = BudgetReservations(env, run, run.budget.unit, world.metrics)
    return PermitPool(
        env=env,
        job=accepted.job,
        run_id=run.run_id,
        limiter=world.limiter,
        storage=StorageBreaker(env.random),
        calls=None,
        reservations=reservations,
        host_limiter=None,
        price=lambda params: Price(credits=1),
        report_wait=lambda reason: None,
    )


async def take_permits(pool: PermitPool, count_max: int) -> list[Permit]:
    permits = await pool.acquire(count_max)
    assert not isinstance(permits, NoPermit)
    pool.inflight_count += len(permits)
    return permits


async def leases_of(world: World, run_id: RunId) -> int:
    return await world.engine.coordinator.count(run_id)


async def test_a_permit_has_a_slot_and_a_lease_and_the_cap_bounds_them(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=10)
    accepted = await world.submit(urls(1), max_inflight=CAP)
    pool = await a_pool(world, accepted)

    permits = await take_permits(pool, 5)

    assert len(permits) == CAP == world.limiter.inflight_count
    assert await leases_of(world, pool.run_id) == CAP
    assert pool.free_count == 0


async def test_a_job_at_its_cap_keeps_no_slot(autojump_clock: MockClock) -> None:
    world = make_world(capacity=10)
    accepted = await world.submit(urls(1), max_inflight=CAP)
    await take_permits(await a_pool(world, accepted), CAP)
    another = await a_pool(world, accepted)

    assert await another.acquire(1) == NoPermit(WaitReason.JOB_CAP)
    assert world.limiter.inflight_count == CAP


async def test_a_fetched_page_passes_its_slot_and_lease_on_once(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=10)
    pool = await a_pool(world, await world.submit(urls(1)))
    (permit,) = await take_permits(pool, 1)

    assert permit.release_early()
    early = (world.limiter.inflight_count, pool.inflight_count, pool.idle_leases)
    await permit.release()

    assert early == (0, 0, [permit.lease_id])
    assert (world.limiter.inflight_count, pool.inflight_count) == (0, 0)
    assert pool.idle_leases == [permit.lease_id]


async def test_a_task_keeps_its_slot_and_lease_while_too_many_tasks_write(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=1)
    pool = await a_pool(world, await world.submit(urls(1)))
    (first,) = await take_permits(pool, 1)
    assert first.release_early()
    (second,) = await take_permits(pool, 1)

    assert not second.release_early()
    assert world.limiter.inflight_count == 1
    await second.release()
    assert world.limiter.inflight_count == 0


async def test_the_next_permit_reuses_the_lease_of_the_last(autojump_clock: MockClock) -> None:
    world = make_world()
    pool = await a_pool(world, await world.submit(urls(1)))
    (first,) = await take_permits(pool, 1)
    await first.release()

    (second,) = await take_permits(pool, 1)

    assert second.lease_id == first.lease_id
    assert await leases_of(world, pool.run_id) == 1


async def test_unused_permits_free_their_slots_and_keep_their_leases_for_the_next_poll(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    pool = await a_pool(world, await world.submit(urls(1)))
    permits = await pool.acquire(4)
    assert not isinstance(permits, NoPermit)

    pool.return_unused(permits)

    assert world.limiter.inflight_count == 0
    assert await leases_of(world, pool.run_id) == len(pool.idle_leases) == 4
    await pool.release_unused()
    assert await leases_of(world, pool.run_id) == 0


async def test_the_end_of_a_task_releases_its_lease_at_the_host(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(1))
    pool = await a_pool(world, accepted)
    host_pool = HostPool(accepted.job.job_id, "example.com", cap=1)
    (permit,) = await take_permits(pool, 1)
    (permit.host_lease_id,) = await world.env.coordinator.acquire_hosts((host_pool,), ttl_s=30)

    await permit.release()

    assert await world.env.coordinator.acquire_hosts((host_pool,), ttl_s=30) != [None]


async def test_the_end_of_a_task_frees_what_its_call_did_not_spend(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(1), budget=BudgetCap(Unit.CREDITS, 1))
    pool = await a_pool(world, accepted)
    assert pool.reservations is not None
    (permit,) = await take_permits(pool, 5)
    (permit.reservation,) = await pool.reservations.reserve([1])

    assert await pool.acquire(1) == NoPermit(WaitReason.BUDGET)
    await permit.release()
    assert await pool.reservations.available() == 1


async def test_an_interrupted_call_counts_at_its_full_price(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(1), budget=BudgetCap(Unit.CREDITS, 1))
    pool = await a_pool(world, accepted)
    assert pool.reservations is not None
    (permit,) = await take_permits(pool, 1)
    (permit.reservation,) = await pool.reservations.reserve([1])

    permit.start_call()
    await permit.release()

    assert await pool.reservations.available() == 0


async def test_an_unavailable_coordinator_keeps_no_slot(autojump_clock: MockClock) -> None:
    world = make_world()
    faults = Faults()
    faults.before["acquire"] = 1
    pool = await a_pool(world, await world.submit(urls(1)), faults=faults)

    with pytest.raises(Unavailable):
        await pool.acquire(2)

    assert world.limiter.inflight_count == 0


async def test_no_lease_is_taken_while_the_poller_waits_for_a_slot(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=1)
    busy = await a_pool(world, await world.submit(urls(1)))
    await take_permits(busy, 1)
    pool = await a_pool(world, await world.submit(urls(1)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.acquire, 1)
        await wait_all_tasks_blocked()
        assert await leases_of(world, pool.run_id) == 0
        nursery.cancel_scope.cancel()

    assert world.limiter.inflight_count == 1


async def test_a_draining_process_gives_no_permit_and_releases_its_leases(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    pool = await a_pool(world, await world.submit(urls(1)))
    (permit,) = await take_permits(pool, 1)
    await permit.release()
    await world.limiter.drain()

    assert await pool.acquire(1) == NoPermit(retry_s=math.inf)
    assert await leases_of(world, pool.run_id) == 0


async def test_a_wait_whose_deadline_has_passed_ends_at_once(autojump_clock: MockClock) -> None:
    waited_since = trio.current_time()

    await Wakeup().wait(-3.0)

    assert trio.current_time() == waited_since


async def test_a_wakeup_ends_one_wait(autojump_clock: MockClock) -> None:
    wakeup = Wakeup()
    wakeup.set()

    await wakeup.wait(10.0)
    assert trio.current_time() == 0.0
    await wakeup.wait(10.0)
    assert trio.current_time() == 10.0
