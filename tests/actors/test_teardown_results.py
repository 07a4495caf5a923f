"""What a stop answers with, from the real actors in virtual time."""

from __future__ import annotations

from dataclasses import replace

import trio
from trio.testing import MockClock

from conveyor.domain.submit.target import TargetPolicy
from conveyor.ports.coordinator import TeardownResult
from conveyor.usecases.context import RuntimeConfig
from conveyor.usecases.run import runs
from tests.actors.world import CALLER, make_world, urls


async def test_a_receipt_counts_what_a_gateway_elsewhere_may_still_be_doing(
    autojump_clock: MockClock,
) -> None:
    async def receipt_of(targets: TargetPolicy | None) -> tuple[TeardownResult, int]:
        world = make_world(think_s=60)
        world = replace(world, env=replace(world.env, policy=RuntimeConfig(targets=targets)))
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
