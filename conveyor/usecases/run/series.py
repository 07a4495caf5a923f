"""Samples of the counters of live runs, and the series that is made of them (docs/api.md,
Series)."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.domain.model import Run, Totals
from conveyor.domain.queries import SamplesOf
from conveyor.domain.run import series
from conveyor.domain.run.series import Bucket
from conveyor.usecases.context import Context


async def sample(env: Context, run: Run, totals: Totals) -> None:
    """Stores a sample if one is due. If another sweeper was faster, the refusal has no effect."""
    change = series.take_sample(run, totals, now=env.now(), tasks_min=env.config.sample_tasks_min)
    if change is not None:
        await env.commit(change)


async def load_series(env: Context, run: Run, totals: Totals) -> list[Bucket]:
    """Returns what ended in each minute. The sum of the buckets is `totals`."""
    query = SamplesOf(job_id=run.job_id, run_id=run.run_id, limit=limits.SAMPLES_MAX)
    return series.make_series(run, await env.store.find(query), totals, now=env.now())
