"""Calls to a remote gateway: within its limit, during its outages, and after a stop
(docs/engines.md, Gateways)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain import limits
from conveyor.domain.ids import CallerId, JobId, LeaseId, RunId
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.gateway import Contact, Outcome, ScrapeRequest
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import run_progress, runs
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.faults import Faults, faulty
from tests.actors.gateways import PlanGateway, another_process, make_remote_world
from tests.actors.world import CALLER, World, urls

pytestmark = pytest.mark.slow


async def reason_of(world: World, accepted: Accepted) -> WaitReason | None:
    run = await world.run_of(accepted)
    seen = await run_progress.load_progress(world.env, run, await totals_of(world.env, run))
    return None if seen.waiting_on is None else seen.waiting_on.reason


@pytest.mark.parametrize("plan", [1, 2, 5, 20, 1_000])
async def test_all_of_the_call_limit_is_used_and_no_more(
    autojump_clock: MockClock, plan: int
) -> None:
    gateway = PlanGateway(plan=plan)
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(10 * min(plan, 60)))
        _, totals = await world.wait_for_end(accepted)

    assert totals.failed == 0
    assert gateway.refused_count <= 1
    assert gateway.working_max == min(plan, 100)
    assert max(gateway.paid.values()) == 1


async def test_a_run_that_waits_for_the_call_limit_reports_it(autojump_clock: MockClock) -> None:
    world = make_remote_world(PlanGateway(plan=3, think_s=20))

    async with world.working():
        accepted = await world.submit(urls(50))
        await trio.sleep(70)
        assert await reason_of(world, accepted) is WaitReason.GATEWAY_LIMIT


async def test_pages_that_crash_their_handler_do_not_use_up_the_call_limit(
    autojump_clock: MockClock,
) -> None:
    class CrashingGateway(PlanGateway):
        async def scrape(self, request: ScrapeRequest) -> Outcome:
            outcome = await PlanGateway.scrape(self, request)
            if request.url in urls(6):
                raise RecursionError
            return outcome

    gateway = CrashingGateway(plan=2)
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(40), max_attempts=2)
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (34, 6)
    assert gateway.refused_count == 0
    assert trio.current_time() < 60


async def test_two_processes_together_keep_to_the_call_limit(autojump_clock: MockClock) -> None:
    gateway = PlanGateway(plan=20)
    world = make_remote_world(gateway)
    other = another_process(world, "other")

    async with world.working(), other.working():
        accepted = await world.submit(urls(900))
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 900
    assert gateway.working_max <= 20
    assert gateway.refused_count <= 1


async def test_a_process_that_starts_later_learns_the_limit_from_the_others(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=20, think_s=1.0)
    world = make_remote_world(gateway)
    other = another_process(world, "other")

    async with world.working():
        accepted = await world.submit(urls(1_200))
        await trio.sleep(25)
        async with other.working():
            await trio.sleep(20)
            assert other.limiter.inflight_count + world.limiter.inflight_count <= 21
            await world.wait_for_end(accepted)

    assert gateway.working_max == 20
    assert gateway.refused_count == 0


async def test_a_lowered_limit_is_kept_after_one_refusal(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=40)
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(1_000))
        await trio.sleep(3)
        gateway.plan, gateway.working_max = 5, 0
        await trio.sleep(2)
        refused, gateway.working_max = gateway.refused_count, 0
        await world.wait_for_end(accepted)

    assert gateway.working_max <= 5
    assert gateway.refused_count == refused


async def test_without_a_stated_limit_refusals_stay_rare(autojump_clock: MockClock) -> None:
    gateway = PlanGateway(plan=15, states=lambda plan, left: (None, None))
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(3_000))
        run, totals = await world.wait_for_end(accepted)

    assert totals.successful == 3_000
    assert gateway.refused_count <= 20
    assert run.ended_at is not None
    assert run.ended_at - run.created_at < 2 * 3_000 / 15 * gateway.think_s + 30


FALSE_LIMITS = {
    "zero": lambda plan, left: (0, 0),
    "more remains than there is": lambda plan, left: (plan, 10**9),
    "huge": lambda plan, left: (10**11, 10**11),
    "nothing ever remains": lambda plan, left: (plan, 0),
    "another each time": lambda plan, left: (1 + left * 7 % 13, left * 5 % 11),
}


@pytest.mark.parametrize("lie", FALSE_LIMITS)
async def test_a_gateway_that_states_false_limits_gets_every_page_done(
    autojump_clock: MockClock, lie: str
) -> None:
    gateway = PlanGateway(plan=10, states=FALSE_LIMITS[lie])
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(60))
        _, totals = await world.wait_for_end(accepted, within_s=3_600)

    assert totals.successful == 60
    assert max(gateway.paid.values()) == 1


async def test_a_gateway_that_refuses_everything_for_a_year_is_waited_for_and_reported(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=0, retry_after_s=365 * 86_400.0)
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(30), max_attempts=1)
        await trio.sleep(1_000)
        assert await reason_of(world, accepted) is WaitReason.GATEWAY_LIMIT
        assert gateway.refused_count <= 10
        gateway.plan = 10
        _, totals = await world.wait_for_end(accepted, within_s=900)

    assert totals.successful == 30


@pytest.mark.parametrize("contact", [Contact.UNREACHABLE, Contact.FAILED])
@pytest.mark.parametrize("count", [3, 300])
async def test_no_task_fails_and_no_attempt_counts_while_the_gateway_is_unavailable(
    autojump_clock: MockClock, contact: Contact, count: int
) -> None:
    gateway = PlanGateway(plan=50, contact=contact)
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(count), max_attempts=1)
        await trio.sleep(290)
        assert await reason_of(world, accepted) is WaitReason.GATEWAY_UNAVAILABLE
        assert gateway.calls.total() < 60
        gateway.contact = Contact.ANSWERED
        run, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (count, 0)
    assert run.ended_at is not None
    assert run.ended_at - run.created_at < 290 + 30 + 35
    assert all(task.attempts == 1 for task in await world.tasks(accepted))
    assert max(gateway.paid.values()) == 1


async def test_a_gateway_outage_during_a_run_counts_no_attempt(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=30)
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(urls(900), max_attempts=1)
        for _ in range(3):
            await trio.sleep(1.5)
            gateway.contact = Contact.FAILED
            await trio.sleep(20)
            gateway.contact = Contact.ANSWERED
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (900, 0)
    assert gateway.calls.total() < 900 + 3 * 60


@pytest.mark.parametrize("poisoned_count", [1, 2, 12])
async def test_targets_that_the_gateway_cannot_fetch_fail_after_their_attempts_and_delay_no_other(
    autojump_clock: MockClock, poisoned_count: int
) -> None:
    pages = urls(200)
    gateway = PlanGateway(plan=20, poisoned=frozenset(pages[:: 200 // poisoned_count]))
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(pages, max_attempts=3)
        _, totals = await world.wait_for_end(accepted, within_s=60)

    assert totals.failed == len(gateway.poisoned)
    assert totals.successful == 200 - totals.failed
    by_url = {task.url: task.attempts for task in await world.tasks(accepted)}
    assert all(by_url[url] == 3 for url in gateway.poisoned)


async def test_a_run_of_one_target_that_the_gateway_cannot_fetch_ends(
    autojump_clock: MockClock,
) -> None:
    pages = urls(1)
    gateway = PlanGateway(plan=20, poisoned=frozenset(pages))
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(pages)
        _, totals = await world.wait_for_end(accepted, within_s=900)

    assert totals.failed == 1


async def test_failing_targets_of_one_caller_do_not_stop_another_caller(
    autojump_clock: MockClock,
) -> None:
    bad = urls(500, host="bad.example")
    gateway = PlanGateway(plan=None, poisoned=frozenset(bad))
    world = make_remote_world(gateway)

    async with world.working():
        await world.submit(bad, caller=CallerId("mallory"), api_key="k1")
        await trio.sleep(60)
        accepted = await world.submit(urls(20), api_key="k2")
        run, totals = await world.wait_for_end(accepted)

    assert totals.successful == 20
    assert run.ended_at is not None
    assert run.ended_at - run.created_at < 5


async def test_runs_with_one_api_key_share_its_call_limit(autojump_clock: MockClock) -> None:
    world = make_remote_world(PlanGateway(plan=10, think_s=1.0))

    async with world.working():
        long = await world.submit(urls(2_000, host="long.example"))
        await trio.sleep(10)
        short = await world.submit(urls(20, host="short.example"))
        run, _ = await world.wait_for_end(short)
        assert (await world.run_of(long)).ended_at is None

    assert run.ended_at is not None
    assert run.ended_at - run.created_at < 15


async def test_interrupted_calls_of_a_stopped_run_count_until_their_deadline(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=8, think_s=limits.SCRAPE_DEADLINE_S - 1)
    world = make_remote_world(gateway)
    other = another_process(world, "other")

    async with world.working():
        warm = await world.submit(urls(1))
        await world.wait_for_end(warm)
        accepted = await world.submit(urls(50))
        await trio.sleep(10)
        assert gateway.inflight_count == 8
        stopped = await runs.stop(world.env, CALLER, accepted.job.job_id)
        assert (stopped.receipt.complete, stopped.receipt.abandoned) == (True, 8)
        assert gateway.inflight_count == 0
        await world.submit(urls(20, host="next.example"))
        async with other.working():
            await trio.sleep(limits.SCRAPE_DEADLINE_S - 30)
            assert gateway.working_count == 8
            assert gateway.refused_count == 0
            await trio.sleep(60)

    assert gateway.working_max == 8
    assert gateway.refused_count == 0
    assert gateway.calls.total() > 9


async def test_a_receipt_counts_calls_that_another_process_interrupted(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=8, think_s=60.0)
    world = make_remote_world(gateway)
    idle = replace(world, env=replace(world.env, process_id="api"))

    async with world.working():
        await world.wait_for_end(await world.submit(urls(1)))
        accepted = await world.submit(urls(50))
        await trio.sleep(10)
        receipt = (await runs.stop(idle.env, CALLER, accepted.job.job_id)).receipt

    assert receipt.abandoned == 8


async def test_no_message_is_received_that_the_call_limit_has_no_room_for(
    autojump_clock: MockClock,
) -> None:
    world = make_remote_world(PlanGateway(plan=5, think_s=5.0))

    async with world.working():
        accepted = await world.submit(urls(100))
        await world.wait_for_end(accepted)

    delivered = world.metrics.registry.get_sample_value("conveyor_queue_messages_delivered_total")
    assert delivered == 100


async def test_slow_pages_at_the_start_do_not_delay_the_others(autojump_clock: MockClock) -> None:
    pages = urls(100)
    gateway = PlanGateway(plan=20, slow=dict.fromkeys(pages[:3], 170.0))
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(pages)
        await trio.sleep(25)
        totals = await totals_of(world.env, await world.run_of(accepted))

    assert totals.successful >= 90
    assert gateway.refused_count == 0


async def test_calls_are_made_while_status_texts_cannot_be_read(autojump_clock: MockClock) -> None:
    world = make_remote_world(PlanGateway(plan=20))
    away = faulty(world.env.coordinator, Faults(before=Counter(marks_on=10_000)))
    world = replace(world, env=replace(world.env, coordinator=away))

    async with world.working():
        _, totals = await world.wait_for_end(await world.submit(urls(50)), within_s=30)

    assert totals.successful == 50


async def test_a_process_that_starts_after_another_was_stopped_uses_the_rest_of_the_call_limit(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=10)
    world = make_remote_world(gateway)

    async with world.working():
        await world.wait_for_end(await world.submit(urls(1, host="first.example")))
        gateway.think_s = 170.0
        await world.submit(urls(5))
        await trio.sleep(20)
        assert gateway.inflight_count == 5
    gateway.think_s = 0.2
    await trio.sleep(60)
    async with another_process(world, "next").working():
        await trio.sleep(20)

    assert gateway.calls.total() == 1 + 5 + 5
    assert gateway.refused_count == 0


class CountingCoordinator:
    """Counts how often leases for calls are requested."""

    def __init__(self, inner: Coordinator) -> None:
        self._inner = inner
        self.acquires_count = 0

    async def acquire(self, job_id: JobId, run_id: RunId, **options: Any) -> list[LeaseId]:
        self.acquires_count += job_id.startswith("gateway-")
        return await self._inner.acquire(job_id, run_id, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_process_without_leases_for_calls_requests_them_only_now_and_then(
    autojump_clock: MockClock,
) -> None:
    gateway = PlanGateway(plan=4, think_s=100.0)
    world = make_remote_world(gateway)
    counted = CountingCoordinator(world.env.coordinator)
    other = another_process(replace(world, env=replace(world.env, coordinator=counted)), "other")

    async with world.working():
        for number in range(30):
            await world.submit(urls(10, host=f"h{number}.example"))
        await trio.sleep(130)
        async with other.working():
            await trio.sleep(60)

    assert gateway.refused_count <= 1
    assert 0 < counted.acquires_count < 60 * 4


async def test_targets_with_unproven_failures_do_not_pause_the_rest_of_their_run(
    autojump_clock: MockClock,
) -> None:
    pages = urls(400)
    gateway = PlanGateway(plan=5, think_s=0.2, poisoned=frozenset(pages[::20]))
    world = make_remote_world(gateway)

    async with world.working():
        accepted = await world.submit(pages)
        await trio.sleep(20)
        totals = await totals_of(world.env, await world.run_of(accepted))

    assert totals.successful >= 370, totals
