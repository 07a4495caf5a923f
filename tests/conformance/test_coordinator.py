"""The laws of Coordinator: leases keep a cap and age out without any call (SPEC.md 4.6)."""

from __future__ import annotations

import pytest
import trio

from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.ports.coordinator import Coordinator
from tests.builders import JOB, OTHER_JOB, OTHER_RUN, RUN, ManualClock


async def _take(
    coordinator: Coordinator,
    count_max: int,
    *,
    job_id: JobId = JOB,
    run_id: RunId = RUN,
    cap: int = 10,
    ttl_s: float = 30,
) -> list[LeaseId]:
    return await coordinator.acquire(job_id, run_id, count_max=count_max, cap=cap, ttl_s=ttl_s)


@pytest.mark.parametrize(("count_max", "expected"), [(0, 0), (1, 1), (3, 3), (10, 10), (11, 10)])
async def test_acquire_takes_as_many_leases_as_requested_within_the_cap(
    coordinator: Coordinator, count_max: int, expected: int
) -> None:
    lease_ids = await _take(coordinator, count_max, cap=10)

    assert len(lease_ids) == len(set(lease_ids)) == expected
    assert await coordinator.count(RUN) == expected


async def test_live_leases_of_a_job_never_exceed_the_cap(coordinator: Coordinator) -> None:
    first = await _take(coordinator, 6, cap=10)
    second = await _take(coordinator, 6, run_id=OTHER_RUN, cap=10)
    third = await _take(coordinator, 6, cap=10)

    assert [len(first), len(second), len(third)] == [6, 4, 0]
    assert await coordinator.count(RUN) == 6
    assert await coordinator.count(OTHER_RUN) == 4


async def test_a_lowered_cap_keeps_live_leases_but_grants_no_more(
    coordinator: Coordinator,
) -> None:
    held = await _take(coordinator, 6, cap=10)

    assert await _take(coordinator, 1, cap=3) == []
    assert await coordinator.renew(held, ttl_s=30) == frozenset()
    assert await coordinator.count(RUN) == 6


async def test_a_cap_is_kept_under_concurrent_acquires(coordinator: Coordinator) -> None:
    granted: list[LeaseId] = []

    async def grab() -> None:
        granted.extend(await _take(coordinator, 3, cap=10))

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(grab)

    assert len(granted) == len(set(granted)) == 10
    assert await coordinator.count(RUN) == 10


async def test_a_cap_is_kept_under_concurrent_acquires_and_releases(
    coordinator: Coordinator,
) -> None:
    counts: list[int] = []

    async def come_and_go() -> None:
        for _ in range(5):
            held = await _take(coordinator, 2, cap=4)
            counts.append(await coordinator.count(RUN))
            await coordinator.release(held)

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(come_and_go)

    assert max(counts) <= 4
    assert await coordinator.count(RUN) == 0


async def test_an_unrenewed_lease_ages_out_after_its_time(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    await _take(coordinator, 2, cap=2, ttl_s=30)

    clock.advance(29.5)
    early = await _take(coordinator, 2, cap=2)
    clock.advance(0.5)
    late = await _take(coordinator, 2, cap=2)

    assert early == []
    assert len(late) == 2
    assert await coordinator.count(RUN) == 2


async def test_a_renewed_lease_lives_for_its_time_from_now(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    [lease, left] = await _take(coordinator, 2, ttl_s=30)
    clock.advance(20)
    await coordinator.renew([lease], ttl_s=30)

    clock.advance(29)

    assert await coordinator.count(RUN) == 1
    assert await coordinator.renew([lease, left], ttl_s=30) == frozenset({left})


async def test_only_a_live_lease_can_be_renewed(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    lease_ids = await _take(coordinator, 2, ttl_s=30)
    clock.advance(30)

    lost = await coordinator.renew(lease_ids, ttl_s=30)

    assert lost == frozenset(lease_ids)
    assert await coordinator.count(RUN) == 0


async def test_renew_returns_exactly_the_lost_leases(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    [aged] = await _take(coordinator, 1, ttl_s=5)
    [released, held] = await _take(coordinator, 2, ttl_s=30)
    await coordinator.release([released])
    clock.advance(5)

    lost = await coordinator.renew([aged, released, held, LeaseId("never-was")], ttl_s=30)

    assert lost == frozenset({aged, released, "never-was"})


async def test_renewing_no_leases_returns_none(coordinator: Coordinator) -> None:
    assert await coordinator.renew([], ttl_s=30) == frozenset()


async def test_releasing_a_lease_frees_its_place_at_once(coordinator: Coordinator) -> None:
    [first, _second] = await _take(coordinator, 2, cap=2)

    await coordinator.release([first])

    assert await coordinator.count(RUN) == 1
    assert len(await _take(coordinator, 2, cap=2)) == 1


async def test_releasing_a_lost_or_released_lease_frees_no_other_place(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    lost = await _take(coordinator, 2, cap=2)
    clock.advance(30)
    await _take(coordinator, 2, cap=2)

    await coordinator.release(lost)
    await coordinator.release([*lost, *lost, LeaseId("never-was")])

    assert await coordinator.count(RUN) == 2
    assert await _take(coordinator, 1, cap=2) == []


async def test_the_leases_of_different_jobs_are_independent(coordinator: Coordinator) -> None:
    here = await _take(coordinator, 5, cap=5)
    there = await _take(coordinator, 5, job_id=OTHER_JOB, run_id=OTHER_RUN, cap=5)

    await coordinator.release(here)

    assert len(there) == 5
    assert not set(here) & set(there)
    assert await coordinator.count(OTHER_RUN) == 5


async def test_the_count_of_a_run_without_leases_is_zero(coordinator: Coordinator) -> None:
    assert await coordinator.count(RUN) == 0


async def test_leases_of_gateway_calls_have_a_cap_of_their_own_and_a_longer_lifetime(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    pool, calls = JobId("gateway-0123456789abcdef"), RunId("calls-0123456789abcdef")
    await _take(coordinator, 10)

    first = await _take(coordinator, 3, job_id=pool, run_id=calls, cap=5)
    second = await _take(coordinator, 10, job_id=pool, run_id=calls, cap=5)
    assert (len(first), len(second)) == (3, 2)

    # The lease of an interrupted call counts until its deadline although it is not renewed.
    assert await coordinator.renew(first, ttl_s=180) == frozenset()
    clock.advance(100)
    assert len(await _take(coordinator, 10, job_id=pool, run_id=calls, cap=5)) == 2
    clock.advance(90)
    assert len(await _take(coordinator, 10, job_id=pool, run_id=calls, cap=5)) == 5
