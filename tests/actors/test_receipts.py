"""What a stop answers with, from the real actors in virtual time."""

from __future__ import annotations

from dataclasses import replace

import trio
from trio.testing import MockClock

from conveyor.domain.addresses import TargetPolicy
from conveyor.ports.signals import Receipt
from conveyor.usecases import runs
from conveyor.usecases.env import Policy
from tests.actors.world import CALLER, make_world, urls


async def test_a_receipt_counts_what_a_gateway_elsewhere_may_still_be_doing(
    autojump_clock: MockClock,
) -> None:
    async def receipt_of(targets: TargetPolicy | None) -> Receipt:
        world = make_world(think_s=100)
        world = replace(world, env=replace(world.env, policy=Policy(targets=targets)))
        async with world.working():
            accepted = await world.submit(urls(3))
            await trio.sleep(5)
            return (await runs.stop(world.env, CALLER, accepted.job.job_id)).receipt

    ours, theirs = await receipt_of(TargetPolicy()), await receipt_of(None)

    assert (ours.complete, ours.abandoned) == (True, 0)
    assert (theirs.complete, theirs.abandoned) == (True, 3)
