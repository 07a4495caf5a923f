"""The laws of Coordinator.acquire_hosts: the cap and the spacing of host pools (SPEC.md 4.8)."""

from __future__ import annotations

import pytest
import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId
from conveyor.ports.coordinator import Coordinator, HostPool
from tests.builders import JOB, OTHER_JOB, RUN, ManualClock

TTL_S = 30.0


def a_pool(
    host: str = "example.com", *, job_id: JobId = JOB, cap: int = 10, spacing_s: float = 0.0
) -> HostPool:
    return HostPool(job_id, host, cap, spacing_s)


async def _acquire(coordinator: Coordinator, *pools: HostPool) -> list[LeaseId | None]:
    return await coordinator.acquire_hosts(pools, ttl_s=TTL_S)


async def _acquire_count(coordinator: Coordinator, pool: HostPool, times: int = 1) -> int:
    return sum(lease is not None for lease in await _acquire(coordinator, *[pool] * times))


async def test_a_host_pool_grants_no_more_leases_than_its_cap(coordinator: Coordinator) -> None:
    first = await _acquire(coordinator, *[a_pool(cap=3)] * 5)

    assert [lease is not None for lease in first] == [True, True, True, False, False]
    assert await _acquire_count(coordinator, a_pool(cap=3)) == 0


async def test_a_host_pool_keeps_its_cap_under_concurrent_acquires(
    coordinator: Coordinator,
) -> None:
    counts: list[int] = []

    async def acquire_two() -> None:
        counts.append(await _acquire_count(coordinator, a_pool(cap=5), 2))

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(acquire_two)

    assert sum(counts) == 5


async def test_a_released_host_lease_makes_room_for_another(coordinator: Coordinator) -> None:
    [lease] = await _acquire(coordinator, a_pool(cap=1))
    assert lease is not None

    await coordinator.release([lease])

    assert await _acquire_count(coordinator, a_pool(cap=1)) == 1


async def test_an_unrenewed_host_lease_ages_out_and_a_renewed_one_lives(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    [lost, lease] = await _acquire(coordinator, *[a_pool(cap=2)] * 2)
    assert lost is not None
    assert lease is not None
    clock.advance(20)
    assert await coordinator.renew([lease], ttl_s=TTL_S) == frozenset()

    clock.advance(10)

    assert await _acquire_count(coordinator, a_pool(cap=2), 2) == 1
    assert await coordinator.renew([lost], ttl_s=TTL_S) == frozenset({lost})


@pytest.mark.parametrize("spacing_s", [0.01, 0.05, 0.2, 3.0])
async def test_a_host_pool_grants_leases_neither_sooner_nor_much_later_than_its_spacing(
    coordinator: Coordinator, clock: ManualClock, spacing_s: float
) -> None:
    pool = a_pool(cap=1_000, spacing_s=spacing_s)
    passed: list[float] = []
    started_at = clock.now()
    for _ in range(200):
        passed += [clock.now()] * await _acquire_count(coordinator, pool, 3)
        clock.advance(0.017)

    for number, at in enumerate(passed):
        for later, then in enumerate(passed[number:], start=1):
            assert later <= 1 + (then - at + limits.HOST_SLACK_S) / spacing_s + 1e-6
    # Lateness is made up for, so the leases are not much later either.
    assert len(passed) >= (clock.now() - started_at - 0.02) / max(spacing_s, 0.017 / 3) * 0.95


async def test_idle_time_does_not_accumulate_leases(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    pool = a_pool(spacing_s=1.0)
    await _acquire_count(coordinator, pool)

    clock.advance(3_600)

    assert await _acquire_count(coordinator, pool, 5) == 1


async def test_a_refused_acquire_does_not_delay_later_ones(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    spaced, small = a_pool(spacing_s=1.0), a_pool("small.example.com", cap=1, spacing_s=1.0)
    await _acquire(coordinator, spaced, small)
    for _ in range(10):
        clock.advance(0.05)
        await _acquire(coordinator, spaced, small)

    clock.advance(0.5)

    assert await _acquire_count(coordinator, spaced) == 1
    assert await _acquire_count(coordinator, small) == 0


async def test_pools_of_different_hosts_and_jobs_are_independent(coordinator: Coordinator) -> None:
    pools = [
        a_pool(cap=1, spacing_s=9.0),
        a_pool("other.example.com", cap=1, spacing_s=9.0),
        a_pool(job_id=OTHER_JOB, cap=1, spacing_s=9.0),
    ]

    leases = await _acquire(coordinator, *pools)

    assert None not in leases
    assert len(set(leases)) == 3


async def test_a_host_pool_and_the_leases_of_its_job_are_independent(
    coordinator: Coordinator,
) -> None:
    await coordinator.acquire(JOB, RUN, count_max=2, cap=2, ttl_s=TTL_S)

    assert await _acquire_count(coordinator, a_pool(cap=2), 3) == 2
    assert await coordinator.count(RUN) == 2
    assert await coordinator.acquire(JOB, RUN, count_max=2, cap=3, ttl_s=TTL_S) != []


async def test_a_shorter_spacing_applies_at_once(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    slow, fast = a_pool(spacing_s=9.0), a_pool(spacing_s=1.0)
    await coordinator.acquire_hosts([slow], ttl_s=30)
    clock.advance(2.0)

    passed = await coordinator.acquire_hosts([slow, fast, fast], ttl_s=30)

    assert [lease is not None for lease in passed] == [False, True, False]
