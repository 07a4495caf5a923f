"""An outage in an awkward moment delays the work: no actor crashes over it."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.errors import Conflict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run, RunStatus
from conveyor.usecases.context import Context
from conveyor.usecases.run import runs
from tests.actors.faults import Faults, faulty
from tests.actors.world import World, make_world, urls


def struck(world: World, faults: Faults) -> World:
    env = replace(
        world.env,
        store=faulty(world.env.store, faults),
        queue=faulty(world.env.queue, faults),
        coordinator=faulty(world.env.coordinator, faults),
    )
    return replace(world, env=env)


async def test_a_poller_that_cannot_give_its_leases_back_ends_all_the_same(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    world = struck(make_world(think_s=5.0), faults)

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


async def test_a_poller_whose_queue_is_gone_asks_again_when_it_cannot_learn_why(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    world = struck(make_world(think_s=5.0), faults)

    async with world.working():
        accepted = await world.submit(urls(60), max_inflight=10)
        await trio.sleep(1)
        await world.engine.queue.close_run(accepted.run.run_id)
        faults.before["read"] = 3
        await trio.sleep(30)
        run, _ = await world.ended(accepted)

    assert faults.fired["read"] == 3
    assert run.status is RunStatus.COMPLETED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stop_that_cannot_be_finished_for_all_the_changes_is_finished_later(
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
        run, _ = await world.ended(accepted)

    assert run.status is RunStatus.STOPPED
    assert next(tries) > 5
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_teardown_ends_the_work_when_leases_cannot_be_counted(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    world = struck(make_world(think_s=50.0), faults)

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
