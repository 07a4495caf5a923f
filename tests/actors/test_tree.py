"""The whole worker: runs end, work is let go of in order, and crashes are survived."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain import limits
from conveyor.domain.errors import make_problem
from conveyor.domain.ids import CallerId, RunId
from conveyor.domain.model import FailureReason, PauseState, RunFailure, RunStatus, TaskStatus
from conveyor.ports.gateway import NotScraped, Outcome, ScrapeRequest
from conveyor.usecases.run import runs
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit import jobs
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, a_miss, a_page, make_world, urls


async def test_every_task_of_a_run_is_fetched_once_and_settled(autojump_clock: MockClock) -> None:
    world = make_world()

    async with world.working():
        accepted = await world.submit(urls(200))
        run, totals = await world.ended(accepted)

    assert run.status is RunStatus.COMPLETED
    assert (totals.done, totals.successful) == (200, 200)
    assert set(world.gateway.calls.values()) == {1}
    assert (await world.engine.queue.depth(run.run_id)).visible == 0


async def test_a_failed_try_is_made_again_until_the_attempts_are_used_up(
    autojump_clock: MockClock,
) -> None:
    world = make_world(script=lambda request, attempt: a_miss())

    async with world.working():
        accepted = await world.submit(urls(3), max_attempts=4)
        run, totals = await world.ended(accepted)

    assert run.status is RunStatus.COMPLETED
    assert totals.failed == 3
    assert set(world.gateway.calls.values()) == {4}
    (task, *_) = await world.tasks(accepted)
    assert [attempt.number for attempt in task.history] == [1, 2, 3, 4]


async def test_a_flaky_page_succeeds_on_a_later_try(autojump_clock: MockClock) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss() if attempt < 3 else a_page()

    world = make_world(script=script)

    async with world.working():
        accepted = await world.submit(urls(10))
        _, totals = await world.ended(accepted)

    assert (totals.successful, totals.failed) == (10, 0)


async def test_a_failure_that_no_retry_can_mend_is_not_tried_again(
    autojump_clock: MockClock,
) -> None:
    world = make_world(
        script=lambda request, attempt: a_miss(FailureReason.BAD_TARGET, retryable=False)
    )

    async with world.working():
        accepted = await world.submit(urls(5))
        _, totals = await world.ended(accepted)

    assert totals.reasons == {"bad_target": 5}
    assert set(world.gateway.calls.values()) == {1}


async def test_no_more_of_a_job_is_in_flight_than_its_cap(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50)

    async with world.working():
        accepted = await world.submit(urls(100), max_inflight=7)
        await world.ended(accepted)

    assert world.gateway.inflight_max == 7


async def test_no_more_is_in_flight_in_a_process_than_it_has_slots(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=10)

    async with world.working():
        first = await world.submit(urls(60, "a.example.com"))
        second = await world.submit(urls(60, "b.example.com"))
        await world.ended(first)
        await world.ended(second)

    assert world.gateway.inflight_max == 10


async def test_a_message_is_received_once_when_nothing_fails(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50)

    async with world.working():
        accepted = await world.submit(urls(500), max_inflight=5)
        await world.ended(accepted)

    registry = world.metrics.registry
    assert registry.get_sample_value("conveyor_queue_messages_delivered_total") == 500
    assert registry.get_sample_value("conveyor_queue_messages_bounced_total") == 0


async def test_a_stop_ends_the_work_and_lets_go_of_everything(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50, think_s=3_600)

    async with world.working() as supervisor:
        accepted = await world.submit(urls(200))
        await trio.sleep(1)
        assert world.gateway.inflight_count == 50
        stopped = await runs.stop(world.env, CALLER, accepted.job.job_id)

        assert stopped.run.status is RunStatus.STOPPED
        assert stopped.receipt.complete
        assert world.gateway.inflight_count == 0
        assert await world.engine.coordinator.count(accepted.run.run_id) == 0
        assert world.pollers(supervisor) == []
        rows = await world.tasks(accepted)
        assert {row.status for row in rows} == {TaskStatus.PENDING}
        assert {row.attempts for row in rows} == {0}
        await trio.sleep(600)
        assert await world.tasks(accepted) == rows


async def test_a_paused_run_fetches_nothing_new_until_it_is_resumed(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=5, think_s=1)

    async with world.working():
        accepted = await world.submit(urls(50))
        await trio.sleep(2.5)
        await runs.set_pause(world.env, CALLER, accepted.job.job_id, PauseState.PAUSED)
        await trio.sleep(5)
        calls = world.gateway.calls.total()
        await trio.sleep(300)
        assert world.gateway.calls.total() == calls < 50
        assert await world.engine.coordinator.count(accepted.run.run_id) == 0

        await runs.set_pause(world.env, CALLER, accepted.job.job_id, PauseState.ACTIVE)
        _, totals = await world.ended(accepted)

    assert totals.successful == 50
    assert set(world.gateway.calls.values()) == {1}


async def test_an_account_error_fails_the_run_and_a_rerun_takes_up_what_is_left(
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
        run, totals = await world.ended(accepted)
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
        run, totals_again = await world.ended(again)

    assert run.status is RunStatus.COMPLETED
    assert again.inherited == totals.successful
    assert totals_again.successful == 40


async def test_work_in_flight_at_shutdown_is_handed_back_and_done_by_the_next_worker(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=20, think_s=10)

    async with world.working():
        accepted = await world.submit(urls(30))
        await trio.sleep(5)
        assert world.gateway.inflight_count == 20

    assert world.gateway.inflight_count == 0
    assert {row.status for row in await world.tasks(accepted)} == {TaskStatus.PENDING}
    assert await world.engine.coordinator.count(accepted.run.run_id) == 0
    async with world.working():
        _, totals = await world.ended(accepted)
    assert totals.successful == 30


async def test_a_long_fetch_keeps_its_lease_its_message_and_its_claim(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=170)

    async with world.working():
        accepted = await world.submit(urls(5))
        _, totals = await world.ended(accepted, within_s=1_000)

    assert totals.successful == 5
    assert set(world.gateway.calls.values()) == {1}


async def test_a_small_job_beside_a_large_one_of_another_caller_gets_its_share(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=10, think_s=1)
    small_alone_s = 1.0

    async with world.working():
        await world.submit(urls(600, "large.example.com"), max_inflight=1_000)
        await trio.sleep(5.5)
        started_at = trio.current_time()
        small = await world.submit(urls(5, "small.example.com"), caller=CallerId("another"))
        await world.ended(small)
        seconds = trio.current_time() - started_at

    assert seconds <= 2 * small_alone_s


@pytest.mark.parametrize("count", [0, 1, 89, 90, 91, 1_000, 1_001, 2_500])
async def test_lists_of_any_length_are_worked_off_completely(
    autojump_clock: MockClock, count: int
) -> None:
    world = make_world(capacity=200, think_s=0)

    async with world.working():
        accepted = await world.submit(urls(count), is_open=count == 0)
        if count == 0:
            await jobs.close(world.env, CALLER, accepted.job.job_id)
        run, totals = await world.ended(accepted)

    assert run.status is RunStatus.COMPLETED
    assert totals.successful == run.total == run.planned == count


@pytest.mark.parametrize("gap_s", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("early_s", [0.06, 0.1, 0.25, 0.3, 0.45])
async def test_a_lease_that_is_between_two_tasks_at_every_beat_does_not_age_out(
    autojump_clock: MockClock, gap_s: float, early_s: float
) -> None:
    world = make_world(capacity=1, think_s=limits.HEARTBEAT_S - early_s)
    slow = faulty(world.env.queue, Faults(latency_s={"receive": gap_s}))
    world = replace(world, env=replace(world.env, queue=slow))

    async with world.working():
        accepted = await world.submit(urls(12), max_inflight=1)
        await world.ended(accepted, within_s=900)

    assert set(world.gateway.calls.values()) == {1}


@pytest.mark.parametrize("slow", ["acquire", "receive", "release", "commit"])
@pytest.mark.parametrize("stop_at_s", [0.05, 0.15, 0.25, 1.05, 1.15, 1.25, 1.35, 2.05])
async def test_a_stop_in_the_middle_of_a_round_leaves_no_lease_behind(
    autojump_clock: MockClock, slow: str, stop_at_s: float
) -> None:
    world = make_world(capacity=10, think_s=1.0)
    faults = Faults(latency_s={slow: 0.1})
    env = replace(
        world.env,
        coordinator=faulty(world.env.coordinator, faults),
        queue=faulty(world.env.queue, faults),
        store=faulty(world.env.store, faults),
    )
    world = replace(world, env=env)

    async with world.working():
        accepted = await world.submit(urls(4), max_inflight=8)
        await trio.sleep(stop_at_s)
        await env.signals.teardown(accepted.job.job_id, accepted.run.run_id, deadline_s=5)

        assert await world.engine.coordinator.count(accepted.run.run_id) == 0
