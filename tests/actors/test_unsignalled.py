"""A worker that no signal reaches: it learns from the run's row that its work is to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from actors.poller.poller import WATCH_S
from conveyor.domain.backpressure.host_limit import HostLimit, HostLimits
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import PauseState, RunStatus
from conveyor.ports.coordinator import TeardownResult
from conveyor.usecases.context import Context
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, World, make_world, urls

STOP_S_MAX = 12.0


class NoSignals:
    """The API of another process: nothing that it says is heard by the worker."""

    async def run_changed(self, job_id: JobId, run_id: RunId) -> None:
        await trio.lowlevel.checkpoint()

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        await trio.lowlevel.checkpoint()

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        await trio.lowlevel.checkpoint()
        return TeardownResult(complete=False)


def _elsewhere(world: World) -> Context:
    return replace(world.env, signals=NoSignals())


@pytest.mark.parametrize("end", ["stop", "delete_run", "delete_job"])
async def test_fetches_end_within_seconds_of_an_end_that_no_signal_told(
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
                    nursery.start_soon(runs.stop, _elsewhere(world), CALLER, job_id)
                case "delete_run":
                    nursery.start_soon(runs.delete_run, _elsewhere(world), CALLER, job_id, run_id)
                case _:
                    nursery.start_soon(jobs.delete, _elsewhere(world), CALLER, job_id)
            with trio.fail_after(STOP_S_MAX):
                while world.gateway.inflight_count:
                    await trio.sleep(0.1)

    assert world.gateway.calls.total() == 5


async def test_a_pause_that_no_signal_told_starts_no_fetch_after_a_few_seconds(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1.0)
    async with world.working():
        accepted = await world.submit(urls(1_000), max_inflight=5)
        await trio.sleep(20)

        await runs.set_pause(_elsewhere(world), CALLER, accepted.job.job_id, PauseState.PAUSED)
        await trio.sleep(WATCH_S + 2.0)
        seen = world.gateway.calls.total()
        await trio.sleep(60)

    assert world.gateway.calls.total() == seen


async def test_a_poller_whose_fetches_end_at_once_still_notices_an_unsignalled_pause(
    autojump_clock: MockClock,
) -> None:
    # One short fetch a second: hardly ever is one in progress when the poller reads the row.
    world = make_world(think_s=0.0)
    async with world.working():
        slow_hosts = HostLimits(HostLimit(rate_per_s=1.0))
        accepted = await world.submit(urls(1_000), host_limits=slow_hosts)
        await trio.sleep(20)

        await runs.set_pause(_elsewhere(world), CALLER, accepted.job.job_id, PauseState.PAUSED)
        await trio.sleep(WATCH_S + 2.0)
        seen = world.gateway.calls.total()
        await trio.sleep(60)

    assert world.gateway.calls.total() == seen


async def test_a_stop_of_a_run_at_work_elsewhere_is_complete_once_its_leases_are_gone(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1_000)
    async with world.working():
        accepted = await world.submit(urls(5))
        await trio.sleep(20)

        stopped = await runs.stop(_elsewhere(world), CALLER, accepted.job.job_id)

        assert world.gateway.inflight_count == 0
        assert await runs.count_leases(world.env, stopped.run) == 0


async def test_a_lease_that_was_acquired_after_a_stop_starts_no_fetch(
    autojump_clock: MockClock,
) -> None:
    """The stop finds no lease while the acquire of a worker, which has not heard of the stop, is
    under way; the queue of the run is closed later."""
    world = make_world(think_s=1_000)
    slow = Faults(latency_s={"acquire": 2.0, "close_run": 5.0})
    coordinator, queue = faulty(world.env.coordinator, slow), faulty(world.env.queue, slow)
    world = replace(world, env=replace(world.env, coordinator=coordinator, queue=queue))
    async with world.working():
        accepted = await world.submit(urls(5))
        await trio.sleep(1.0)

        stopped = await runs.stop(_elsewhere(world), CALLER, accepted.job.job_id)
        await trio.sleep(30)

    assert stopped.run.status is RunStatus.STOPPED
    assert not world.gateway.calls
