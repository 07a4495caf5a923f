"""The laws of Coordinator: leases keep a cap, and age out by themselves (SPEC.md 4.6)."""

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
async def test_acquiring_takes_as_many_as_asked_for_within_the_cap(
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


async def test_a_lowered_cap_takes_nothing_away_but_grants_nothing_more(
    coordinator: Coordinator,
) -> None:
    held = await _take(coordinator, 6, cap=10)

    assert await _take(coordinator, 1, cap=3) == []
    assert await coordinator.renew(held, ttl_s=30) == frozenset()
    assert await coordinator.count(RUN) == 6


async def test_a_cap_is_kept_by_many_who_acquire_at_once(coordinator: Coordinator) -> None:
    granted: list[LeaseId] = []

    async def grab() -> None:
        granted.extend(await _take(coordinator, 3, cap=10))

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(grab)

    assert len(granted) == len(set(granted)) == 10
    assert await coordinator.count(RUN) == 10


async def test_a_cap_is_kept_while_leases_come_and_go(coordinator: Coordinator) -> None:
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


async def test_renewing_gives_a_lease_a_new_life_from_now(
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


async def test_renewing_answers_exactly_those_that_were_lost(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    [aged] = await _take(coordinator, 1, ttl_s=5)
    [released, held] = await _take(coordinator, 2, ttl_s=30)
    await coordinator.release([released])
    clock.advance(5)

    lost = await coordinator.renew([aged, released, held, LeaseId("never-was")], ttl_s=30)

    assert lost == frozenset({aged, released, "never-was"})


async def test_renewing_nothing_loses_nothing(coordinator: Coordinator) -> None:
    assert await coordinator.renew([], ttl_s=30) == frozenset()


async def test_releasing_frees_the_place_at_once(coordinator: Coordinator) -> None:
    [first, _second] = await _take(coordinator, 2, cap=2)

    await coordinator.release([first])

    assert await coordinator.count(RUN) == 1
    assert len(await _take(coordinator, 2, cap=2)) == 1


async def test_releasing_again_or_a_lost_lease_frees_nobody_elses_place(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    lost = await _take(coordinator, 2, cap=2)
    clock.advance(30)
    await _take(coordinator, 2, cap=2)

    await coordinator.release(lost)
    await coordinator.release([*lost, *lost, LeaseId("never-was")])

    assert await coordinator.count(RUN) == 2
    assert await _take(coordinator, 1, cap=2) == []


async def test_jobs_share_nothing(coordinator: Coordinator) -> None:
    here = await _take(coordinator, 5, cap=5)
    there = await _take(coordinator, 5, job_id=OTHER_JOB, run_id=OTHER_RUN, cap=5)

    await coordinator.release(here)

    assert len(there) == 5
    assert not set(here) & set(there)
    assert await coordinator.count(OTHER_RUN) == 5


async def test_a_run_that_holds_nothing_counts_zero(coordinator: Coordinator) -> None:
    assert await coordinator.count(RUN) == 0


async def test_the_pool_of_a_gateways_key_keeps_its_cap_beside_jobs_and_runs(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    pool, calls = JobId("gateway-0123456789abcdef"), RunId("calls-0123456789abcdef")
    await _take(coordinator, 10)

    first = await _take(coordinator, 3, job_id=pool, run_id=calls, cap=5)
    second = await _take(coordinator, 10, job_id=pool, run_id=calls, cap=5)
    assert (len(first), len(second)) == (3, 2)

    # A call that was cut off counts until its deadline, and nobody renews it meanwhile.
    assert await coordinator.renew(first, ttl_s=180) == frozenset()
    clock.advance(100)
    assert len(await _take(coordinator, 10, job_id=pool, run_id=calls, cap=5)) == 2
    clock.advance(90)
    assert len(await _take(coordinator, 10, job_id=pool, run_id=calls, cap=5)) == 5
