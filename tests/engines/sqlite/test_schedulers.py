"""Schedulers in several processes with one data directory: a nominal time fires once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.domain.ids import JobId
from conveyor.domain.model import RunStatus
from conveyor.domain.queries import RunsIn
from conveyor.domain.schedule import Overlap, Rate, RateUnit
from conveyor.engines.sqlite import EmbeddedEngine, join_engine, open_engine
from conveyor.usecases import schedule
from conveyor.usecases.context import Context
from conveyor.usecases.schedule import Fired
from conveyor.usecases.submit.jobs import Submission
from tests.builders import CALLER, T0, ManualClock, a_ulid
from tests.usecases.world import a_world, some_drafts

JOBS = 30
PROCESSES = 3

# Fires everything that is due in every job, and prints how many runs it started.
SCHEDULER = """
import sys, trio
from pathlib import Path
from tests.engines.sqlite.test_schedulers import fire_all

print(trio.run(fire_all, Path(sys.argv[1])))
"""


def env_over(engine: EmbeddedEngine, clock: ManualClock) -> Context:
    return replace(
        a_world().env,
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
    )


async def fire_all(data_dir: Path) -> int:
    clock = ManualClock(T0 + 3600)
    async with join_engine(data_dir, clock=clock, random=Random()) as engine:
        env = env_over(engine, clock)
        fired = [
            await schedule.trigger_schedule(env, JobId(a_ulid(number))) for number in range(JOBS)
        ]
    return fired.count(Fired.STARTED)


@pytest.mark.slow
async def test_concurrent_schedulers_start_one_run_for_each_nominal_time(
    data_dir: Path, clock: ManualClock
) -> None:
    counts: list[int] = []

    async def run_scheduler() -> None:
        command = [sys.executable, "-c", SCHEDULER, str(data_dir)]
        ended = await trio.run_process(command, capture_stdout=True)
        counts.append(int(ended.stdout))

    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev") as owner:
        env = env_over(owner, clock)
        rule, request = Rate(1, RateUnit.HOUR, T0), Submission(drafts=some_drafts(1))
        for number in range(JOBS):
            job_id = JobId(a_ulid(number))
            await schedule.submit(env, CALLER, request, rule, Overlap.SKIP, job_id=job_id)

        async with trio.open_nursery() as nursery:
            for _ in range(PROCESSES):
                nursery.start_soon(run_scheduler)

        query = RunsIn(statuses=frozenset(RunStatus), limit=10 * JOBS)
        rows = await owner.store.find(query)
        assert sum(counts) == len(rows) == JOBS
        assert len({run.job_id for run in rows}) == JOBS
        assert {run.scheduled_for for run in rows} == {T0 + 3600}
