"""Helpers that create scheduled jobs and finish their runs."""

from __future__ import annotations

from conveyor.domain.changes import ScheduleKey
from conveyor.domain.ids import JobId
from conveyor.domain.lifecycle import RUN_VISIBLE
from conveyor.domain.model import Job, Run
from conveyor.domain.queries import RunsOf
from conveyor.domain.schedule import Overlap, Rate, RateUnit, Rule, Schedule
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.submit.jobs import Submission
from tests.builders import CALLER, T0, a_ulid
from tests.usecases.run.test_rerun import ingest_open
from tests.usecases.world import run_of, some_drafts, work

HOUR = 3600.0
HOURLY = Rate(1, RateUnit.HOUR, T0)
DAILY = Rate(1, RateUnit.DAY, T0)


async def schedule(
    env: Context,
    rule: Rule = HOURLY,
    overlap: Overlap = Overlap.SKIP,
    *,
    count: int = 3,
    number: int = 700,
) -> Job:
    request = Submission(drafts=some_drafts(count))
    job_id = JobId(a_ulid(number))
    return (await schedules.submit(env, CALLER, request, rule, overlap, job_id=job_id)).job


async def row_of(env: Context, job: Job) -> Schedule:
    row = await env.store.read(ScheduleKey(job.job_id))
    assert row is not None
    return row


async def runs_of(env: Context, job: Job) -> list[Run]:
    """All runs of the job, oldest first."""
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, limit=100)
    return (await env.store.find(query))[::-1]


async def finish(env: Context, run: Run) -> Run:
    await ingest_open(env, run)
    await work(env, run)
    return await run_of(env, run)


async def finish_latest(env: Context, job: Job) -> Run:
    return await finish(env, (await runs_of(env, job))[-1])
