"""IngestStreamer: batches are ingested once, or their runs stop with a reason."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from trio.testing import MockClock

from actors.messages import BatchOpened
from conveyor.domain.model import RunStatus
from conveyor.usecases.context import RuntimeConfig
from tests.actors.world import make_world, urls


async def test_a_list_that_cannot_be_read_stops_its_run_with_a_reason(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    config = RuntimeConfig(sync_tasks_max=100)
    world = replace(world, env=replace(world.env, config=config))
    accepted = await world.submit(urls(150))
    await world.env.blobs.delete_prefix(f"sources/{accepted.job.job_id}")

    async with world.working():
        run, _ = await world.wait_for_end(accepted, within_s=600)

    assert run.status is RunStatus.STOPPED
    assert run.stop_reason == "ingest_failed"


async def test_a_batch_that_is_reported_several_times_is_ingested_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "actors.ingest_streamer")
    world = make_world(think_s=0)
    config = RuntimeConfig(sync_tasks_max=100)
    world = replace(world, env=replace(world.env, config=config))
    accepted = await world.submit(urls(150))
    opened = BatchOpened(accepted.job.job_id, accepted.run.run_id)
    for _ in range(3):
        world.mail.streamer.address.tell_nowait(opened)

    async with world.working():
        run, totals = await world.wait_for_end(accepted)

    assert (run.status, totals.successful) == (RunStatus.COMPLETED, 150)
    assert [record.getMessage() for record in caplog.records].count("batch ingested") == 1
