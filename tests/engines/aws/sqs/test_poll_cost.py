"""The cost of showing a live run: read units, counted by the meter on modelled services."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

from trio.testing import MockClock

from conveyor.api.schedule import load_job_response, show_job
from conveyor.domain.ids import JobId
from conveyor.engines.redis import running_on
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.submit import jobs
from tests.builders import CALLER
from tests.simulation.models.worlds import World
from tests.usecases.world import a_world, some_drafts

SHARDS = 8


async def test_a_repeated_poll_of_a_job_reads_its_rows_but_no_counters(
    autojump_clock: MockClock,
) -> None:
    world = World()
    await world.set_up()
    engine, env = await world.engine(), a_world(shard_count=SHARDS).env
    async with running_on(
        world.redis.link(), random=Random(1), space="s", owner="here", workers_on="workers"
    ) as redis:
        env = replace(
            env,
            store=engine.store,
            queue=engine.queue,
            coordinator=redis.coordinator,
            clock=world.clock,
            cache=redis.cache,
        )
        asked = jobs.Submission(drafts=some_drafts(20), is_open=True)
        accepted = await jobs.submit(env, CALLER, asked, job_id=JobId(env.new_id()))
        units = []
        look = partial(load_job_response, env, CALLER, accepted.job.job_id)

        async def change() -> None:
            await show_job(env, await load_owned_job(env, CALLER, accepted.job.job_id))

        for ask in (look, look, change, look):
            before = engine.meter.read_units
            await ask()
            units.append(engine.meter.read_units - before)

    assert units == [2 + SHARDS, 2, 3 + SHARDS, 2 + SHARDS]
