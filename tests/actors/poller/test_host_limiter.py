"""Host limits: they hold over all processes, and waiting for a host costs few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock

from actors.limiters.fair_limiter import FairLimiter
from actors.tree import LocalSignals, Mailboxes, helper_tree
from conveyor.domain import limits
from conveyor.domain.budget import Price
from conveyor.domain.model import HostLimit, HostLimits, PauseState, RunStatus
from conveyor.domain.submit.target import host_of
from conveyor.ports.coordinator import HostPool
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.telemetry import make_metrics
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import runs
from conveyor.usecases.run.run_progress import load_progress
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, World, a_page, make_world, urls

ONE, OTHER = "one.example.com", "other.example.com"


@dataclass(slots=True)
class Hosts:
    """A gateway that records, by host, how many fetches run at once and when each began."""

    think_s: float = 0.2
    busy: Counter[str] = field(default_factory=Counter)
    busy_max: Counter[str] = field(default_factory=Counter)
    begun: dict[str, list[float]] = field(default_factory=dict)

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        host = host_of(request.url)
        assert host is not None
        self.busy[host] += 1
        self.busy_max[host] = max(self.busy_max[host], self.busy[host])
        self.begun.setdefault(host, []).append(trio.current_time())
        try:
            await trio.sleep(self.think_s)
        finally:
            self.busy[host] -= 1
        return a_page()


def a_host_world(think_s: float = 0.2) -> tuple[World, Hosts]:
    hosts = Hosts(think_s)
    return replace(make_world(), gateway=hosts), hosts  # type: ignore[arg-type]


@asynccontextmanager
async def helping(world: World) -> AsyncGenerator[None, None]:
    """Runs one more process with the same engine."""
    mail = Mailboxes()
    signals = LocalSignals(mail.discovery.address, mail.streamer.address)
    supervisor = helper_tree(
        replace(world.env, signals=signals),
        mail,
        gateway=world.gateway,
        limiter=FairLimiter(capacity=50),
        metrics=make_metrics(CollectorRegistry()),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        yield
        nursery.cancel_scope.cancel()


def receives_per_task(world: World, tasks: int) -> float:
    total = world.metrics.registry.get_sample_value("conveyor_queue_messages_delivered_total")
    assert total is not None
    return total / tasks


async def test_the_concurrency_limit_of_a_host_holds_over_all_processes(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world()
    host_limits = HostLimits(HostLimit(concurrency=3), {OTHER: HostLimit(concurrency=1)})

    async with world.working(), helping(world):
        accepted = await world.submit(urls(60, ONE) + urls(20, OTHER), host_limits=host_limits)
        run, totals = await world.wait_for_end(accepted)

    assert run.status is RunStatus.COMPLETED
    assert totals.successful == 80
    assert hosts.busy_max == {ONE: 3, OTHER: 1}


async def test_fetches_of_a_host_begin_no_more_often_than_its_rate_limit(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world()

    async with world.working(), helping(world):
        accepted = await world.submit(
            urls(60, ONE), host_limits=HostLimits(HostLimit(rate_per_s=5.0))
        )
        await world.wait_for_end(accepted)

    starts = hosts.begun[ONE]
    for number, at in enumerate(starts):
        for later, then in enumerate(starts[number:], start=1):
            # A fetch begins a moment after its lease at the host was acquired.
            assert later <= 1 + (then - at + limits.HOST_SLACK_S + 0.1) * 5.0
    assert starts[-1] - starts[0] < 60 / 5.0 * 1.25


async def test_a_page_that_is_being_written_takes_no_place_at_its_host(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world(think_s=0.1)
    faults = Faults(latency_s={"commit": 1.0})
    world = replace(world, env=replace(world.env, store=faulty(world.env.store, faults)))

    async with world.working():
        accepted = await world.submit(
            urls(60, ONE), host_limits=HostLimits(HostLimit(concurrency=1))
        )
        await world.wait_for_end(accepted)

    starts = hosts.begun[ONE]
    assert hosts.busy_max == {ONE: 1}
    # A claim takes a second here, and so does a settle. Waiting for both would take 126 s.
    assert starts[-1] - starts[0] < 90


async def test_a_host_at_its_limit_costs_no_second_receive_and_no_attempt(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world(think_s=0.5)

    async with world.working():
        accepted = await world.submit(
            urls(300, ONE), host_limits=HostLimits(HostLimit(concurrency=2))
        )
        await world.wait_for_end(accepted)

    tasks = await world.tasks(accepted)
    assert {(task.claim, task.attempts, task.handed_back) for task in tasks} == {(1, 1, 0)}
    assert receives_per_task(world, 300) <= 1.05
    assert hosts.begun[ONE][-1] - hosts.begun[ONE][0] < 300 * 0.5 / 2 * 1.2


async def test_a_message_that_cannot_be_held_returns_about_when_its_turn_comes(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world(think_s=0.5)
    count = limits.HELD_MESSAGES_MAX + 300

    async with world.working():
        accepted = await world.submit(
            urls(count, ONE), host_limits=HostLimits(HostLimit(concurrency=4))
        )
        await world.wait_for_end(accepted)

    assert receives_per_task(world, count) < 2
    assert hosts.begun[ONE][-1] - hosts.begun[ONE][0] < count * 0.5 / 4 * 1.2


async def test_messages_whose_turns_are_close_are_bounced_in_one_call(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_host_world(think_s=0.1)
    faults = Faults()
    world = replace(world, env=replace(world.env, queue=faulty(world.env.queue, faults)))

    async with world.working():
        accepted = await world.submit(
            urls(limits.HELD_MESSAGES_MAX + 400, ONE),
            host_limits=HostLimits(HostLimit(concurrency=16)),
        )
        await world.wait_for_end(accepted)

    bounced = world.metrics.registry.get_sample_value("conveyor_queue_messages_bounced_total")
    assert bounced
    assert bounced >= 100
    assert faults.calls["bounce"] < bounced / 4


async def test_held_messages_stay_hidden_for_as_long_as_they_wait(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_host_world(think_s=2 * limits.VISIBILITY_S)

    async with world.working(), helping(world):
        accepted = await world.submit(
            urls(6, ONE), host_limits=HostLimits(HostLimit(concurrency=1))
        )
        await world.wait_for_end(accepted, within_s=2_000)

    tasks = await world.tasks(accepted)
    assert {(task.claim, task.attempts) for task in tasks} == {(1, 1)}
    assert receives_per_task(world, 6) <= 1


async def test_held_messages_are_released_when_the_run_is_paused(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_host_world(think_s=1.0)

    async with world.working():
        accepted = await world.submit(
            urls(30, ONE), host_limits=HostLimits(HostLimit(concurrency=1))
        )
        await trio.sleep(5)
        parked = await world.env.queue.depth(accepted.run.run_id)
        await runs.set_pause(world.env, CALLER, accepted.job.job_id, PauseState.PAUSED)
        await trio.sleep(5)
        paused = await world.env.queue.depth(accepted.run.run_id)

    assert parked.visible == 0
    assert paused.hidden == 0
    # One may have been in flight, and the one before it may have been written meanwhile.
    assert parked.hidden - 2 <= paused.visible <= parked.hidden


async def test_held_messages_are_released_when_the_worker_ends(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_host_world(think_s=1.0)

    async with world.working():
        accepted = await world.submit(
            urls(30, ONE), host_limits=HostLimits(HostLimit(concurrency=1))
        )
        await trio.sleep(5.5)

    assert (await world.env.queue.depth(accepted.run.run_id)).hidden == 0


async def test_tasks_of_other_hosts_do_not_wait_for_a_host_at_its_limit(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world(think_s=1.0)

    async with world.working():
        accepted = await world.submit(
            urls(300, ONE) + urls(20, OTHER),
            host_limits=HostLimits(HostLimit(), {ONE: HostLimit(concurrency=1)}),
        )
        await trio.sleep(10)
        await world.env.signals.teardown(accepted.run.job_id, accepted.run.run_id, deadline_s=5)

    assert len(hosts.begun[OTHER]) == 20
    assert hosts.busy_max[ONE] == 1


async def test_a_run_that_waits_for_its_hosts_names_the_one_with_the_most_pages(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_host_world(think_s=30.0)
    given = HostLimits(HostLimit(concurrency=2), {OTHER: HostLimit(rate_per_s=0.1)})

    async with world.working():
        accepted = await world.submit(urls(9, ONE) + urls(4, OTHER), host_limits=given)
        await trio.sleep(20)
        run = await world.run_of(accepted)
        progress = await load_progress(world.env, run, await totals_of(world.env, run))

    assert progress.waiting_on is not None
    assert progress.waiting_on.detail == (
        "pages of one.example.com wait for its limit of 2 at once; 1 more host waits"
    )


async def test_a_long_fetch_keeps_its_lease_at_the_host(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world(think_s=3 * limits.LEASE_TTL_S)

    async with world.working(), helping(world):
        accepted = await world.submit(
            urls(4, ONE), host_limits=HostLimits(HostLimit(concurrency=1))
        )
        _, totals = await world.wait_for_end(accepted, within_s=2_000)

    assert totals.successful == 4
    assert hosts.busy_max == {ONE: 1}


@pytest.mark.parametrize("holds", [1, 3])
async def test_host_leases_of_a_killed_process_age_out(
    autojump_clock: MockClock, holds: int
) -> None:
    world, _ = a_host_world()
    accepted = await world.submit(urls(9, ONE), host_limits=HostLimits(HostLimit(concurrency=3)))
    pool = HostPool(accepted.job.job_id, ONE, cap=3)
    await world.env.coordinator.acquire_hosts([pool] * holds, ttl_s=limits.LEASE_TTL_S)

    async with world.working():
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 9
    assert trio.current_time() < limits.LEASE_TTL_S + 20


async def test_an_outage_during_the_release_of_held_messages_ends_no_actor(
    autojump_clock: MockClock,
) -> None:
    world, hosts = a_host_world()
    faults = Faults()
    world = replace(world, env=replace(world.env, queue=faulty(world.env.queue, faults)))

    async with world.working() as supervisor:
        accepted = await world.submit(
            urls(limits.HELD_MESSAGES_MAX + 60, ONE),
            host_limits=HostLimits(HostLimit(concurrency=1)),
        )
        faults.before["bounce"] = 3
        await trio.sleep(3)
        pollers = world.pollers(supervisor)
        _, totals = await world.wait_for_end(accepted)

    assert pollers == [accepted.run.run_id]
    assert faults.fired["bounce"] == 3
    assert totals.successful == limits.HELD_MESSAGES_MAX + 60
    assert hosts.busy_max == {ONE: 1}
