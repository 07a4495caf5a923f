"""IngestStreamer: batches are ingested once, or their runs stop with a reason."""

from __future__ import annotations

from dataclasses import replace

from trio.testing import MockClock

from conveyor.domain.model import RunStatus
from conveyor.usecases.context import RuntimeConfig
from tests.actors.world import make_world, urls


async def test_a_list_that_cannot_be_read_stops_its_run_with_a_reason(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    policy = RuntimeConfig(sync_tasks_max=100)
    world = replace(world, env=replace(world.env, policy=policy))
    accepted = await world.submit(urls(150))
    await world.env.blobs.delete_prefix(f"sources/{accepted.job.job_id}")

    async with world.working():
        run, _ = await world.ended(accepted, within_s=600)

    assert run.status is RunStatus.STOPPED
    assert run.stop_reason == "ingest_failed"
