"""QueueDiscovery: each live run gets a poller, and no run can prevent that of others."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from actors.messages import RunChanged
from conveyor.domain.changes import JobKey
from conveyor.domain.errors import Conflict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run, RunStatus
from conveyor.domain.submit.target import TargetPolicy
from conveyor.ports.coordinator import TeardownResult
from conveyor.usecases.context import Context, RuntimeConfig
from conveyor.usecases.run import runs
from tests.actors.faults import Faults, has_crashed_actor, with_faults
from tests.actors.world import CALLER, make_world, urls, without_signals


async def test_discovery_finds_a_run_without_a_signal(autojump_clock: MockClock) -> None:
    world = without_signals(make_world())

    async with world.working():
        await trio.sleep(30)
        accepted = await world.submit(urls(5))
        _, totals = await world.wait_for_end(accepted, within_s=30)

    assert totals.successful == 5


async def test_a_stop_that_loses_every_race_is_finished_by_a_later_scan(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, finish = count(1), runs.finish_stop

    async def contended(env: Context, job_id: JobId, run_id: RunId) -> Run | None:
        if next(tries) <= 4:
            raise Conflict("The run is changing too fast; try again.", retry_after_s=1)
        return await finish(env, job_id, run_id)

    monkeypatch.setattr(runs, "finish_stop", contended)
    world = make_world(think_s=5.0)

    async with world.working():
        accepted = await world.submit(urls(4))
        with pytest.raises(Conflict):
            await runs.stop(world.env, accepted.job.caller, accepted.job.job_id)
        run, _ = await world.wait_for_end(accepted)

    assert run.status is RunStatus.STOPPED
    assert next(tries) > 5
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_teardown_ends_the_work_when_leases_cannot_be_counted(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    world = with_faults(make_world(think_s=50.0), faults)

    async with world.working() as supervisor:
        accepted = await world.submit(urls(4))
        await trio.sleep(1)
        faults.before["count"] = 1
        receipt = await world.env.signals.teardown(
            accepted.job.job_id, accepted.run.run_id, deadline_s=5
        )

        assert receipt.complete
        assert world.pollers(supervisor) == []

    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_run_that_crashes_discovery_is_deferred_and_the_others_are_polled(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    reads: list[float] = []
    store = world.env.store

    class CrashingStore:
        """Crashes whenever the job of one run is read."""

        async def read(self, key: Any) -> Any:
            if poisoned and key == JobKey(poisoned[0]):
                reads.append(trio.current_time())
                raise ValueError("a job that nobody thought of")
            return await store.read(key)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    poisoned: list[JobId] = []
    bad = await world.submit(urls(2))
    world = replace(world, env=replace(world.env, store=cast("Any", CrashingStore())))
    poisoned.append(bad.job.job_id)

    async with world.working():
        good = [await world.submit(urls(5)) for _ in range(3)]
        for accepted in good:
            await world.wait_for_end(accepted)
        started_at = trio.current_time()
        while trio.current_time() < started_at + 1800:
            world.mail.discovery.address.tell_nowait(RunChanged(bad.job.job_id, bad.run.run_id))
            await trio.sleep(60)
        tries = len(reads)
        poisoned.clear()
        _, totals = await world.wait_for_end(bad, within_s=900)

    assert totals.successful == 2
    assert 4 <= tries <= 10
    crashes = [record for record in caplog.records if "a run crashed" in record.getMessage()]
    assert sum(record.levelno >= logging.ERROR for record in crashes) == 1
    assert not has_crashed_actor(caplog)


async def test_a_stop_counts_the_calls_that_a_remote_gateway_may_continue(
    autojump_clock: MockClock,
) -> None:
    async def receipt_of(targets: TargetPolicy | None) -> tuple[TeardownResult, int]:
        world = make_world(think_s=60)
        world = replace(world, env=replace(world.env, config=RuntimeConfig(targets=targets)))
        async with world.working():
            accepted = await world.submit(urls(200))
            await trio.sleep(63)
            inflight = world.gateway.inflight_count
            receipt = (await runs.stop(world.env, CALLER, accepted.job.job_id)).receipt
            assert inflight > 0
            return receipt, inflight

    ours, _ = await receipt_of(TargetPolicy())
    theirs, inflight = await receipt_of(None)

    assert (ours.complete, ours.abandoned) == (True, 0)
    assert (theirs.complete, theirs.abandoned) == (True, inflight)
