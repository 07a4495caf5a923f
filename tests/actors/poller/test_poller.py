"""RunPoller: how many tasks of a run may be in flight, and what ends its polls."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from actors.poller.poller import WATCH_S, PollerState
from conveyor.domain import limits
from conveyor.domain.ids import CallerId
from conveyor.domain.model import HostLimit, HostLimits, PauseState, RunStatus
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs
from tests.actors.faults import Faults, faulty, with_faults
from tests.actors.world import CALLER, make_world, urls, without_signals


async def test_no_more_tasks_of_a_job_are_in_flight_than_its_cap(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50)

    async with world.working():
        accepted = await world.submit(urls(100), max_inflight=7)
        await world.wait_for_end(accepted)

    assert world.gateway.inflight_max == 7


async def test_no_more_tasks_are_in_flight_in_a_process_than_it_has_slots(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=10)

    async with world.working():
        first = await world.submit(urls(60, "a.example.com"))
        second = await world.submit(urls(60, "b.example.com"))
        await world.wait_for_end(first)
        await world.wait_for_end(second)

    assert world.gateway.inflight_max == 10


async def test_a_message_is_received_once_when_nothing_fails(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50)

    async with world.working():
        accepted = await world.submit(urls(500), max_inflight=5)
        await world.wait_for_end(accepted)

    registry = world.metrics.registry
    assert registry.get_sample_value("conveyor_queue_messages_delivered_total") == 500
    assert registry.get_sample_value("conveyor_queue_messages_bounced_total") == 0


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
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 50
    assert set(world.gateway.calls.values()) == {1}


async def test_a_small_job_takes_at_most_twice_its_time_beside_a_large_one(
    autojump_clock: MockClock,
) -> None:
    world = make_world(capacity=10, think_s=1)
    small_alone_s = 1.0

    async with world.working():
        await world.submit(urls(600, "large.example.com"), max_inflight=1_000)
        await trio.sleep(5.5)
        started_at = trio.current_time()
        small = await world.submit(urls(5, "small.example.com"), caller=CallerId("another"))
        await world.wait_for_end(small)
        seconds = trio.current_time() - started_at

    assert seconds <= 2 * small_alone_s


@pytest.mark.parametrize("gap_s", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("early_s", [0.06, 0.1, 0.25, 0.3, 0.45])
async def test_a_lease_that_is_idle_at_every_heartbeat_does_not_age_out(
    autojump_clock: MockClock, gap_s: float, early_s: float
) -> None:
    world = make_world(capacity=1, think_s=limits.HEARTBEAT_S - early_s)
    slow = faulty(world.env.queue, Faults(latency_s={"receive": gap_s}))
    world = replace(world, env=replace(world.env, queue=slow))

    async with world.working():
        accepted = await world.submit(urls(12), max_inflight=1)
        await world.wait_for_end(accepted, within_s=900)

    assert set(world.gateway.calls.values()) == {1}


@pytest.mark.parametrize("slow", ["acquire", "receive", "release", "commit"])
@pytest.mark.parametrize("stop_at_s", [0.05, 0.15, 0.25, 1.05, 1.15, 1.25, 1.35, 2.05])
async def test_a_stop_during_a_poll_leaves_no_lease_behind(
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


async def test_a_poller_that_cannot_release_its_leases_ends(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    world = with_faults(make_world(think_s=5.0), faults)

    async with world.working():
        accepted = await world.submit(urls(4))
        await trio.sleep(1)
        faults.before["release"] = 5
        receipt = await world.env.signals.teardown(
            accepted.job.job_id, accepted.run.run_id, deadline_s=5
        )

    assert faults.fired["release"]
    assert receipt.complete
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_poller_whose_queue_and_run_cannot_be_read_tries_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    world = with_faults(make_world(think_s=5.0), faults)

    async with world.working():
        accepted = await world.submit(urls(60), max_inflight=10)
        await trio.sleep(1)
        await world.engine.queue.close_run(accepted.run.run_id)
        faults.before["read"] = 3
        await trio.sleep(30)
        run, _ = await world.wait_for_end(accepted)

    assert faults.fired["read"] == 3
    assert run.status is RunStatus.COMPLETED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


STOP_S_MAX = 12.0


@pytest.mark.parametrize("end", ["stop", "delete_run", "delete_job"])
async def test_fetches_end_soon_after_their_run_although_no_signal_arrives(
    autojump_clock: MockClock, end: str
) -> None:
    world = make_world(think_s=1_000)
    async with world.working():
        accepted = await world.submit(urls(5))
        await trio.sleep(20)
        assert world.gateway.inflight_count == 5

        async with trio.open_nursery() as nursery:
            job_id, run_id = accepted.job.job_id, accepted.run.run_id
            match end:
                case "stop":
                    nursery.start_soon(runs.stop, without_signals(world).env, CALLER, job_id)
                case "delete_run":
                    nursery.start_soon(
                        runs.delete_run, without_signals(world).env, CALLER, job_id, run_id
                    )
                case _:
                    nursery.start_soon(jobs.delete, without_signals(world).env, CALLER, job_id)
            with trio.fail_after(STOP_S_MAX):
                while world.gateway.inflight_count:
                    await trio.sleep(0.1)

    assert world.gateway.calls.total() == 5


async def test_a_pause_stops_new_fetches_although_no_signal_arrives(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1.0)
    async with world.working():
        accepted = await world.submit(urls(1_000), max_inflight=5)
        await trio.sleep(20)

        await runs.set_pause(
            without_signals(world).env, CALLER, accepted.job.job_id, PauseState.PAUSED
        )
        await trio.sleep(WATCH_S + 2.0)
        seen = world.gateway.calls.total()
        await trio.sleep(60)

    assert world.gateway.calls.total() == seen


async def test_a_poller_with_short_fetches_notices_a_pause_although_no_signal_arrives(
    autojump_clock: MockClock,
) -> None:
    # One short fetch a second: hardly ever is one in progress when the poller reads the row.
    world = make_world(think_s=0.0)
    async with world.working():
        slow_hosts = HostLimits(HostLimit(rate_per_s=1.0))
        accepted = await world.submit(urls(1_000), host_limits=slow_hosts)
        await trio.sleep(20)

        await runs.set_pause(
            without_signals(world).env, CALLER, accepted.job.job_id, PauseState.PAUSED
        )
        await trio.sleep(WATCH_S + 2.0)
        seen = world.gateway.calls.total()
        await trio.sleep(60)

    assert world.gateway.calls.total() == seen


async def test_a_stop_by_another_process_waits_until_the_leases_are_released(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1_000)
    async with world.working():
        accepted = await world.submit(urls(5))
        await trio.sleep(20)

        stopped = await runs.stop(without_signals(world).env, CALLER, accepted.job.job_id)

        assert world.gateway.inflight_count == 0
        assert await runs.count_leases(world.env, stopped.run) == 0


async def test_a_lease_that_was_acquired_after_a_stop_starts_no_fetch(
    autojump_clock: MockClock,
) -> None:
    """The stop finds no lease, because a worker without a signal is still acquiring one. The queue
    of the run is closed later."""
    world = make_world(think_s=1_000)
    slow = Faults(latency_s={"acquire": 2.0, "close_run": 5.0})
    coordinator, queue = faulty(world.env.coordinator, slow), faulty(world.env.queue, slow)
    world = replace(world, env=replace(world.env, coordinator=coordinator, queue=queue))
    async with world.working():
        accepted = await world.submit(urls(5))
        await trio.sleep(1.0)

        stopped = await runs.stop(without_signals(world).env, CALLER, accepted.job.job_id)
        await trio.sleep(30)

    assert stopped.run.status is RunStatus.STOPPED
    assert not world.gateway.calls


async def test_a_poller_that_has_ended_leaves_nothing_in_memory(autojump_clock: MockClock) -> None:
    """The garbage collector is off, because it runs rarely and each poller holds the row of a
    job."""
    world = make_world()
    gc.collect()
    # An earlier test of the same process may have left some that are still referenced.
    earlier = [state for state in gc.get_objects() if isinstance(state, PollerState)]
    gc.disable()
    try:
        async with world.working():
            for _ in range(3):
                await world.wait_for_end(await world.submit(urls(5)))
        states = [state for state in gc.get_objects() if isinstance(state, PollerState)]
    finally:
        gc.enable()

    assert [state for state in states if not any(state is old for old in earlier)] == []
