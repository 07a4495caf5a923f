"""TaskRunner: what becomes of one task, whatever happens around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from conveyor.domain import limits
from conveyor.domain.changes import Change, TaskKey, Verdict
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.domain.model import FailureReason, RunStatus
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.coordinator import Coordinator, HostPool
from conveyor.ports.errors import PartlyUnavailable
from conveyor.ports.gateway import Deferred, Outcome, ScrapeRequest
from conveyor.ports.store import Store
from conveyor.usecases.run import tasks
from tests.actors.faults import Faults, faulty
from tests.actors.world import a_miss, a_page, make_world, urls


@pytest.mark.parametrize(
    "think_s", [limits.HEARTBEAT_S - 0.02, limits.HEARTBEAT_S, limits.HEARTBEAT_S + 0.02]
)
async def test_a_retry_that_is_settled_during_a_beat_comes_back_on_time(
    autojump_clock: MockClock, think_s: float
) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss() if attempt == 1 else a_page()

    world = make_world(script=script, think_s=think_s)
    slow = faulty(world.env.queue, Faults(latency_s={"extend": 0.05, "bounce": 0.01}))
    world = replace(world, env=replace(world.env, queue=slow))

    async with world.working():
        accepted = await world.submit(urls(30))
        _, totals = await world.ended(accepted)

    assert totals.successful == 30
    assert trio.current_time() < 2 * think_s + 10


async def test_a_task_that_loses_its_worker_each_time_comes_to_an_end(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(1), max_attempts=2)
    for _ in range(1 + limits.LOST_WORKERS_MAX):
        (message,) = await world.env.queue.receive(
            accepted.run.run_id, count_max=1, visibility_s=limits.VISIBILITY_S
        )
        (await tasks.claim(world.env, [message.ref]))[0]
        await trio.sleep(limits.CLAIM_TTL_S + 1)

    async with world.working():
        run, totals = await world.ended(accepted)

    (task,) = await world.tasks(accepted)
    assert (run.status, totals.failed) == (RunStatus.COMPLETED, 1)
    assert task.problem is not None
    assert task.problem.code == "worker_crashed"
    assert world.gateway.calls.total() == 0


async def test_a_task_that_somebody_else_holds_is_left_to_them(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(1))
    (message,) = await world.env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=1)
    (await tasks.claim(world.env, [message.ref]))[0]

    async with world.working():
        await trio.sleep(limits.CLAIM_TTL_S - 5)
        assert world.gateway.calls.total() == 0
        _, totals = await world.ended(accepted)

    assert totals.successful == 1


@dataclass(slots=True)
class OutOfBreath:
    """A store with no room for claims until then; it says so, and writes nothing."""

    inner: Store
    until: float

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        is_claim = any(isinstance(write.key, TaskKey) for each in changes for write in each.writes)
        if is_claim and trio.current_time() < self.until:
            raise PartlyUnavailable("throttled", [None] * len(changes), range(len(changes)))
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_tasks_that_the_store_had_no_room_for_are_back_long_before_a_claim_lapses(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(30))
    breathless = OutOfBreath(world.env.store, until=trio.current_time() + 3)
    world = replace(world, env=replace(world.env, store=breathless))

    async with world.working():
        _, totals = await world.ended(accepted)

    assert totals.successful == 30
    assert trio.current_time() < limits.CLAIM_TTL_S / 2


async def test_what_a_site_asks_for_in_retry_after_is_honoured(autojump_clock: MockClock) -> None:
    times: list[float] = []

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        times.append(trio.current_time())
        if attempt > 1:
            return a_page()
        return msgspec.structs.replace(a_miss(FailureReason.RATE_LIMITED), retry_after_s=77.0)

    world = make_world(script=script, think_s=0)

    async with world.working():
        await world.ended(await world.submit(urls(1)))

    first, second = times
    assert 77.0 <= second - first < 80.0


async def test_a_deferred_task_comes_back_on_time_with_its_cost_and_without_an_attempt(
    autojump_clock: MockClock,
) -> None:
    times: list[float] = []

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        times.append(trio.current_time())
        if attempt > 5:
            return a_page()
        return Deferred(
            reason=WaitReason.GATEWAY_LIMIT, detail="full", retry_after_s=3.0, credits=2
        )

    world = make_world(script=script, think_s=0)

    async with world.working():
        accepted = await world.submit(urls(1), max_attempts=1)
        _, totals = await world.ended(accepted)

    (task,) = await world.tasks(accepted)
    assert (totals.successful, totals.credits, task.credits) == (1, 10, 10)
    assert (task.attempts, len(task.history)) == (1, 6)
    waits = [later - before for before, later in pairwise(times)]
    assert all(2.99 < wait_s < 5.0 for wait_s in waits), waits


async def test_a_deferred_task_without_a_time_of_its_own_waits_longer_with_each_receive(
    autojump_clock: MockClock,
) -> None:
    times: list[float] = []

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        times.append(trio.current_time())
        return a_page() if attempt > 3 else Deferred(reason=WaitReason.STORAGE, detail="away")

    world = make_world(script=script, think_s=0)

    async with world.working():
        await world.ended(await world.submit(urls(1), max_attempts=1))

    waits = [later - before for before, later in pairwise(times)]
    assert waits == sorted(waits)
    assert waits[0] >= limits.BOUNCE_S_MIN


@dataclass(slots=True)
class RememberingCoordinator:
    """Knows every lease that it gave out, so that a test can take them away."""

    inner: Coordinator
    leases: list[LeaseId] = field(default_factory=list)

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        acquired = await self.inner.acquire(
            job_id, run_id, count_max=count_max, cap=cap, ttl_s=ttl_s
        )
        self.leases += acquired
        return acquired

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        entered = await self.inner.acquire_hosts(pools, ttl_s=ttl_s)
        self.leases += [lease_id for lease_id in entered if lease_id is not None]
        return entered

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        return await self.inner.renew(lease_ids, ttl_s=ttl_s)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self.inner.release(lease_ids)

    async def count(self, run_id: RunId) -> int:
        return await self.inner.count(run_id)

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        await self.inner.put_status(owner, marks, ttl_s=ttl_s)

    async def list_status(self, subject: str) -> list[str]:
        return await self.inner.list_status(subject)


async def test_work_that_lost_its_lease_is_handed_back_at_once(autojump_clock: MockClock) -> None:
    world = make_world(think_s=25)
    forgetful = RememberingCoordinator(world.env.coordinator)
    world = replace(world, env=replace(world.env, coordinator=forgetful))

    async with world.working():
        accepted = await world.submit(urls(1))
        await trio.sleep(1)
        await forgetful.release(forgetful.leases)
        run, totals = await world.ended(accepted)

    assert totals.successful == 1
    assert world.gateway.calls.total() == 2
    assert run.ended_at is not None
    assert run.ended_at - run.created_at < limits.HEARTBEAT_S + 25 + 5


async def test_the_next_page_is_fetched_while_the_last_is_being_written(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=1, think_s=10.0)
    slow = faulty(world.env.blobs, Faults(latency_s={"add": 9.0}))
    world = replace(world, env=replace(world.env, blobs=slow))

    async with world.working():
        accepted = await world.submit(urls(5), max_inflight=1)
        _, totals = await world.ended(accepted)

    assert totals.successful == 5
    assert world.gateway.inflight_max == 1
    assert trio.current_time() < 5 * 10.0 + 9.0 + 5.0


async def test_a_disk_that_hangs_stops_the_fetching(autojump_clock: MockClock) -> None:
    world = make_world(capacity=2, think_s=1.0)
    stuck = faulty(world.env.blobs, Faults(latency_s={"add": 50.0}))
    world = replace(world, env=replace(world.env, blobs=stuck))

    async with world.working():
        await world.submit(urls(20))
        await trio.sleep(40.0)

    assert world.gateway.calls.total() == 4
