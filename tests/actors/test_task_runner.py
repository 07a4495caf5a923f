"""TaskRunner: the outcome of one task, whatever happens around it."""

from __future__ import annotations

import copy
import errno
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
from conveyor.domain.errors import make_problem
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.domain.model import FailureReason, RunFailure, RunStatus, TaskStatus
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.coordinator import Coordinator, HostPool
from conveyor.ports.errors import PartlyUnavailable
from conveyor.ports.gateway import Deferred, NotScraped, Outcome, ScrapeRequest
from conveyor.ports.secret_box import CannotUnseal
from conveyor.ports.store import Store
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import run_progress, tasks
from conveyor.usecases.run.rerun import rerun
from tests.actors.faults import Faults, count_errors, faulty
from tests.actors.world import CALLER, a_miss, a_page, make_world, urls


@pytest.mark.parametrize(
    "think_s", [limits.HEARTBEAT_S - 0.02, limits.HEARTBEAT_S, limits.HEARTBEAT_S + 0.02]
)
async def test_a_retry_that_is_settled_during_a_heartbeat_is_redelivered_on_time(
    autojump_clock: MockClock, think_s: float
) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss() if attempt == 1 else a_page()

    world = make_world(script=script, think_s=think_s)
    slow = faulty(world.env.queue, Faults(latency_s={"extend": 0.05, "bounce": 0.01}))
    world = replace(world, env=replace(world.env, queue=slow))

    async with world.working():
        accepted = await world.submit(urls(30))
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 30
    assert trio.current_time() < 2 * think_s + 10


async def test_a_task_that_loses_its_worker_each_time_fails(
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
        run, totals = await world.wait_for_end(accepted)

    (task,) = await world.tasks(accepted)
    assert (run.status, totals.failed) == (RunStatus.COMPLETED, 1)
    assert task.problem is not None
    assert task.problem.code == "worker_crashed"
    assert world.gateway.calls.total() == 0


async def test_a_task_that_another_worker_has_claimed_is_not_fetched(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(1))
    (message,) = await world.env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=1)
    (await tasks.claim(world.env, [message.ref]))[0]

    async with world.working():
        await trio.sleep(limits.CLAIM_TTL_S - 5)
        assert world.gateway.calls.total() == 0
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 1


@dataclass(slots=True)
class ThrottledClaims:
    """A store that throttles claims until a time, and writes nothing for them."""

    inner: Store
    until: float

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        is_claim = any(
            isinstance(write.key, TaskKey) for change in changes for write in change.writes
        )
        if is_claim and trio.current_time() < self.until:
            raise PartlyUnavailable("throttled", [None] * len(changes), range(len(changes)))
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_tasks_whose_claims_were_throttled_return_long_before_a_claim_would_lapse(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(30))
    throttled = ThrottledClaims(world.env.store, until=trio.current_time() + 3)
    world = replace(world, env=replace(world.env, store=throttled))

    async with world.working():
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 30
    assert trio.current_time() < limits.CLAIM_TTL_S / 2


async def test_the_retry_after_of_a_site_is_honoured(autojump_clock: MockClock) -> None:
    times: list[float] = []

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        times.append(trio.current_time())
        if attempt > 1:
            return a_page()
        return msgspec.structs.replace(a_miss(FailureReason.RATE_LIMITED), retry_after_s=77.0)

    world = make_world(script=script, think_s=0)

    async with world.working():
        await world.wait_for_end(await world.submit(urls(1)))

    first, second = times
    assert 77.0 <= second - first < 80.0


async def test_a_deferred_task_is_redelivered_on_time_with_its_cost_and_without_an_attempt(
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
        _, totals = await world.wait_for_end(accepted)

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
        await world.wait_for_end(await world.submit(urls(1), max_attempts=1))

    waits = [later - before for before, later in pairwise(times)]
    assert waits == sorted(waits)
    assert waits[0] >= limits.BOUNCE_S_MIN


@dataclass(slots=True)
class RememberingCoordinator:
    """Records every lease that it granted, so that a test can take them away."""

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


async def test_work_that_lost_its_lease_is_released_at_once(autojump_clock: MockClock) -> None:
    world = make_world(think_s=25)
    forgetful = RememberingCoordinator(world.env.coordinator)
    world = replace(world, env=replace(world.env, coordinator=forgetful))

    async with world.working():
        accepted = await world.submit(urls(1))
        await trio.sleep(1)
        await forgetful.release(forgetful.leases)
        run, totals = await world.wait_for_end(accepted)

    assert totals.successful == 1
    assert world.gateway.calls.total() == 2
    assert run.ended_at is not None
    assert run.ended_at - run.created_at < limits.HEARTBEAT_S + 25 + 5


async def test_the_next_page_is_fetched_while_the_previous_one_is_written(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=1, think_s=10.0)
    slow = faulty(world.env.blobs, Faults(latency_s={"add": 9.0}))
    world = replace(world, env=replace(world.env, blobs=slow))

    async with world.working():
        accepted = await world.submit(urls(5), max_inflight=1)
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 5
    assert world.gateway.inflight_max == 1
    assert trio.current_time() < 5 * 10.0 + 9.0 + 5.0


async def test_a_page_is_freed_from_memory_when_it_is_stored_given_up_or_interrupted(
    autojump_clock: MockClock,
) -> None:
    held: list[str] = []

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        assert request.memory is not None
        held.append(request.url)
        request.memory.hold(lambda: held.remove(request.url))
        return a_page()

    world = make_world(script=script, think_s=1.0)
    slow = faulty(world.env.blobs, Faults(latency_s={"add": 5.0}))
    world = replace(world, env=replace(world.env, blobs=slow))

    async with world.working():
        await world.submit(urls(3))
        await trio.sleep(4.0)
        assert len(held) == 3
        await trio.sleep(4.0)
        assert held == []
        await world.submit(urls(3))
        await trio.sleep(3.0)
        assert len(held) == 3

    assert held == []


async def test_a_disk_that_does_not_answer_stops_new_fetches(autojump_clock: MockClock) -> None:
    world = make_world(capacity=2, think_s=1.0)
    stuck = faulty(world.env.blobs, Faults(latency_s={"add": 50.0}))
    world = replace(world, env=replace(world.env, blobs=stuck))

    async with world.working():
        await world.submit(urls(20))
        await trio.sleep(40.0)

    assert world.gateway.calls.total() == 4


async def test_a_task_is_retried_until_its_attempts_are_used_up(
    autojump_clock: MockClock,
) -> None:
    world = make_world(script=lambda request, attempt: a_miss())

    async with world.working():
        accepted = await world.submit(urls(3), max_attempts=4)
        run, totals = await world.wait_for_end(accepted)

    assert run.status is RunStatus.COMPLETED
    assert totals.failed == 3
    assert set(world.gateway.calls.values()) == {4}
    (task, *_) = await world.tasks(accepted)
    assert [attempt.number for attempt in task.history] == [1, 2, 3, 4]


async def test_a_task_succeeds_on_a_later_attempt(autojump_clock: MockClock) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss() if attempt < 3 else a_page()

    world = make_world(script=script)

    async with world.working():
        accepted = await world.submit(urls(10))
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (10, 0)


async def test_a_permanent_failure_is_not_retried(
    autojump_clock: MockClock,
) -> None:
    world = make_world(
        script=lambda request, attempt: a_miss(FailureReason.BAD_TARGET, retryable=False)
    )

    async with world.working():
        accepted = await world.submit(urls(5))
        _, totals = await world.wait_for_end(accepted)

    assert totals.reasons == {"bad_target": 5}
    assert set(world.gateway.calls.values()) == {1}


async def test_an_account_error_fails_the_run_and_a_rerun_finishes_it(
    autojump_clock: MockClock,
) -> None:
    broke = True

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        if not broke or request.url.endswith("/0"):
            return a_page()
        return NotScraped(
            reason=FailureReason.AUTH_FAILED,
            problem=make_problem("payment_required", "No credit", 402, "The account is empty."),
            retryable=False,
            run_failure=RunFailure.INSUFFICIENT_CREDITS,
        )

    world = make_world(script=script, capacity=4)

    async with world.working():
        accepted = await world.submit(urls(40))
        run, totals = await world.wait_for_end(accepted)
        assert run.status is RunStatus.FAILED
        assert run.failure_reason is RunFailure.INSUFFICIENT_CREDITS
        assert run.failure_detail == "The account is empty."
        assert totals.failed == 0
        broke = False
        again = await rerun(
            world.env,
            CALLER,
            accepted.job.job_id,
            retry=frozenset({TaskStatus.PENDING}),
            run_id=RunId(world.env.new_id()),
        )
        run, totals_again = await world.wait_for_end(again)

    assert run.status is RunStatus.COMPLETED
    assert again.inherited == totals.successful
    assert totals_again.successful == 40


POISON = urls(1)[0]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Exceeds the limit (4300 digits) for integer string conversion"),
        CannotUnseal(),
        AssertionError(),
        ExceptionGroup("", [KeyError("a")]),
        RecursionError(),
    ],
    ids=repr,
)
async def test_a_task_that_crashes_its_runner_uses_up_its_own_attempts_only(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        if request.url == POISON:
            raise copy.copy(error)  # One that is raised twice collects both tracebacks.
        return a_page()

    world = make_world(script=script)

    async with world.working():
        accepted = await world.submit(urls(300), max_attempts=3)
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (299, 1)
    assert world.gateway.calls.total() == 299 + 3
    (poisoned,) = [row for row in await world.tasks(accepted) if row.status is TaskStatus.FAILED]
    assert poisoned.problem is not None
    assert poisoned.problem.code == "worker_crashed"
    assert [entry.number for entry in poisoned.history] == [1, 2, 3]
    assert count_errors(caplog, "a task crashed its handler") == 3
    assert count_errors(caplog, "child") == 0


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, ""), MemoryError(), RuntimeError("can't start new thread")],
    ids=repr,
)
async def test_a_worker_out_of_resources_defers_its_tasks_and_reports_the_reason(
    autojump_clock: MockClock, error: Exception
) -> None:
    ends_at = trio.current_time() + 60

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        if trio.current_time() < ends_at:
            raise copy.copy(error)  # One that is raised twice collects both tracebacks.
        return a_page()

    world = make_world(script=script)

    async with world.working():
        accepted = await world.submit(urls(100), max_attempts=1)
        await trio.sleep(30)
        run = await world.run_of(accepted)
        seen = await run_progress.load_progress(world.env, run, await totals_of(world.env, run))
        calls = world.gateway.calls.total()
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (100, 0)
    assert seen.waiting_on is not None
    assert seen.waiting_on.reason is WaitReason.RESOURCES
    assert calls < 1000
