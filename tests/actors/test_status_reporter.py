"""StatusReporter: what callers see about a run that waits, with the real actors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import trio
from trio.testing import MockClock

from actors.status_reporter import StatusReporter, WaitStatus
from conveyor.domain import limits
from conveyor.domain.ids import CallerId, RunId, TaskId
from conveyor.domain.model import FailureReason, PauseState
from conveyor.domain.run.wait_reason import OpenFetch, RunProgress, Waiting, WaitReason
from conveyor.engines.memory import MemoryCoordinator
from conveyor.ports.errors import Unavailable
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import runs
from conveyor.usecases.run.run_progress import load_progress
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.world import CALLER, World, a_miss, make_world, urls
from tests.builders import RUN, T0


async def progress_of(world: World, accepted: Accepted) -> RunProgress:
    run = await world.run_of(accepted)
    return await load_progress(world.env, run, await totals_of(world.env, run))


async def cause_of(world: World, accepted: Accepted) -> Waiting:
    progress = (await progress_of(world, accepted)).waiting_on
    assert progress is not None
    return progress


async def test_without_a_worker_a_run_waits_for_one(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(3))

    progress = await cause_of(world, accepted)

    assert (progress.reason, progress.detail) == (WaitReason.NO_WORKERS, "no worker is running")


async def test_a_worker_that_has_stopped_is_missing_at_once(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=100)
    accepted = await world.submit(urls(9), max_inflight=1)
    async with world.working():
        await trio.sleep(5)
        assert (await cause_of(world, accepted)).reason is WaitReason.JOB_CAP

    assert (await cause_of(world, accepted)).reason is WaitReason.NO_WORKERS


async def test_a_run_at_its_cap_reports_that_and_since_when(autojump_clock: MockClock) -> None:
    world = make_world(think_s=3)
    async with world.working():
        accepted = await world.submit(urls(60), max_inflight=4)
        await trio.sleep(20)
        progress = await cause_of(world, accepted)
        begun_at = (await world.run_of(accepted)).created_at

    assert (progress.reason, progress.detail) == (WaitReason.JOB_CAP, "4 of 4 in flight")
    assert progress.since is not None
    assert progress.since - begun_at < 3


async def test_the_estimated_time_left_is_approximately_right(autojump_clock: MockClock) -> None:
    world = make_world(think_s=1)
    async with world.working():
        accepted = await world.submit(urls(400), max_inflight=4)
        await trio.sleep(40)
        progress = await progress_of(world, accepted)
        totals = await totals_of(world.env, accepted.run)

    assert progress.eta_s is not None
    left_s = (400 - totals.done) / 4
    assert 0.8 * left_s < progress.eta_s < 1.4 * left_s


async def test_a_paused_run_reports_that_and_has_no_estimated_end(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1)
    async with world.working():
        accepted = await world.submit(urls(400), max_inflight=4)
        await trio.sleep(20)
        await runs.set_pause(world.env, CALLER, accepted.job.job_id, PauseState.PAUSED)
        await trio.sleep(5)
        progress = await progress_of(world, accepted)

    assert progress.waiting_on is not None
    assert progress.waiting_on.reason is WaitReason.PAUSED
    assert progress.waiting_on.since is not None
    assert progress.eta_s is None


async def test_tasks_between_attempts_report_the_kind_of_their_last_failure(
    autojump_clock: MockClock,
) -> None:
    async def reason_for(miss: FailureReason) -> WaitReason:
        world = make_world(script=lambda request, attempt: a_miss(miss))
        async with world.working():
            accepted = await world.submit(urls(3), max_attempts=10)
            await trio.sleep(60)
            return (await cause_of(world, accepted)).reason

    assert await reason_for(FailureReason.RATE_LIMITED) is WaitReason.RATE_LIMITED
    assert await reason_for(FailureReason.GATEWAY_ERROR) is WaitReason.RETRY_BACKOFF


async def test_a_run_that_gets_no_slot_waits_for_busy_workers(autojump_clock: MockClock) -> None:
    world = make_world(capacity=2, think_s=100)
    async with world.working():
        await world.submit(urls(9), caller=CallerId("somebody else"))
        await trio.sleep(1)
        accepted = await world.submit(urls(9))
        await trio.sleep(10)
        progress = await cause_of(world, accepted)

    assert progress.reason is WaitReason.WORKERS_BUSY
    assert progress.detail == "other runs use 1 of 2 slots"


async def test_an_ended_run_has_no_wait_reason(autojump_clock: MockClock) -> None:
    world = make_world()
    async with world.working():
        accepted = await world.submit(urls(3))
        await world.wait_for_end(accepted)

        assert await progress_of(world, accepted) == RunProgress()


class CountingCoordinator(MemoryCoordinator):
    """Counts how often status texts were put, and on how many subjects."""

    def __init__(self, world: World) -> None:
        super().__init__(world.env.clock, Random(1))
        self.left: list[set[str]] = []

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        self.left.append(set(marks))
        await super().put_status(owner, marks, ttl_s=ttl_s)


async def test_status_texts_are_put_on_change_and_now_and_then_but_never_per_task(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    counting = CountingCoordinator(world)
    wait_status = WaitStatus()
    env = replace(world.env, coordinator=counting)
    reporter = StatusReporter(env=env, wait_status=wait_status)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reporter.run)
        for _ in range(1_000):
            wait_status.set_reason(RUN, WaitReason.JOB_CAP, at=env.now())
            wait_status.set_reason(RUN, None, at=env.now())
            wait_status.count_finished(RUN)
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()

    renewals = 100 / reporter.renew_s
    assert len(counting.left) <= 1 + 1 + renewals + 1
    assert len(await counting.list_status(RUN)) == 1


class UnavailableCoordinator(MemoryCoordinator):
    """Does not answer until its outage ends."""

    is_back = False

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        if not self.is_back:
            raise Unavailable("away")
        await super().put_status(owner, marks, ttl_s=ttl_s)


async def test_an_outage_of_the_coordinator_ends_no_actor_and_reports_resume_after_it(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    absent = UnavailableCoordinator(world.env.clock, Random(1))
    env, wait_status = replace(world.env, coordinator=absent), WaitStatus()
    wait_status.set_reason(RUN, WaitReason.JOB_CAP, at=env.now())
    reporter = StatusReporter(env=env, wait_status=wait_status)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reporter.run)
        await trio.sleep(60)
        absent.is_back = True
        await trio.sleep(reporter.renew_s + reporter.poll_s)

        assert len(await absent.list_status(RUN)) == 1
        nursery.cancel_scope.cancel()


def test_a_wait_reason_that_recurs_at_once_keeps_its_start() -> None:
    wait_status = WaitStatus()
    wait_status.set_reason(RUN, WaitReason.JOB_CAP, at=T0)
    wait_status.set_reason(RUN, None, at=T0 + 5)
    wait_status.set_reason(RUN, WaitReason.JOB_CAP, at=T0 + 5.5)
    back = wait_status.take_reports(T0 + 6, elapsed_s=1)[RUN]
    wait_status.set_reason(RUN, None, at=T0 + 7)
    gone = wait_status.take_reports(T0 + 9, elapsed_s=1)[RUN]

    assert (back.reason, back.since) == (WaitReason.JOB_CAP, T0)
    assert gone.reason is None


def test_the_rate_of_a_run_with_rare_ends_is_right_from_the_start() -> None:
    wait_status = WaitStatus()

    rates = []
    for second in range(2, 42, 2):
        if second % 8 == 0:
            wait_status.count_finished(RUN)
        else:
            wait_status.set_reason(RUN, None, at=T0 + second)
        rates.append(wait_status.take_reports(T0 + second, elapsed_s=2)[RUN].rate)

    # One task ends in 8 s. The first end does not mean one in each 2 s.
    assert max(rates) < 0.2
    assert 0.1 < rates[-1] < 0.2


def test_the_longest_fetches_are_reported_the_oldest_first() -> None:
    wait_status = WaitStatus()
    for number in range(20):
        wait_status.begin_fetch(RUN, TaskId(f"task-{number}"), at=T0 + number)
    wait_status.end_fetch(RUN, TaskId("task-1"))

    report = wait_status.take_reports(T0 + 100, elapsed_s=1)[RUN]
    early = wait_status.take_reports(T0 + 4.5, elapsed_s=1)[RUN]

    expected = [0, *range(2, limits.OLDEST_FETCHES + 1)]
    assert report.oldest == tuple(OpenFetch(TaskId(f"task-{n}"), T0 + n) for n in expected)
    assert [fetch.task_id for fetch in early.oldest] == ["task-0", "task-2"]


def test_a_fetch_that_ends_after_its_run_was_forgotten_leaves_no_entry() -> None:
    wait_status = WaitStatus()
    wait_status.begin_fetch(RUN, TaskId("task"), at=T0)
    wait_status.forget(RUN)

    wait_status.end_fetch(RUN, TaskId("task"))

    assert wait_status.take_reports(T0, elapsed_s=1) == {}


def test_a_forgotten_run_is_no_longer_reported() -> None:
    wait_status = WaitStatus()
    wait_status.set_reason(RunId("x"), None, at=T0)

    wait_status.forget(RunId("x"))

    assert wait_status.take_reports(T0, elapsed_s=1) == {}
