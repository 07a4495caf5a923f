"""Retention: some time after its results have expired, nothing of a run is kept (SPEC.md 4.20).

Rows go by the path of any deletion: a run alone, or its job where no other run is left.
"""

from __future__ import annotations

from conveyor.domain.changes import JobKey
from conveyor.domain.errors import Conflict
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE
from conveyor.domain.model import Job, JobType, Run
from conveyor.domain.queries import DueExpiries, RunsOf
from conveyor.usecases import expiry, jobs, runs
from conveyor.usecases.env import Env

_PAGE = 100
# A run that others inherited from outlives them; how often they are looked at.
_NEEDED_S = 86_400.0


async def remove_old_rows(env: Env) -> int:
    """Deletes runs whose results expired `row_days` ago; answers how many."""
    due = await env.store.find(DueExpiries(due_by=env.now(), limit=_PAGE))
    old = [run for run in due if expiry.is_old(env, run)]
    return sum([await _remove(env, run) for run in old])


async def _remove(env: Env, run: Run) -> bool:
    job = await env.store.read(JobKey(run.job_id))
    if job is None or job.status not in JOB_VISIBLE:
        await env.commit(expiry.swept(run, sweep_at=None))  # Its scrub is on the way.
        return False
    try:
        if await _is_all_of_job(env, job, run):
            await jobs.delete(env, job.caller, job.job_id)
        else:
            await runs.delete_run(env, job.caller, job.job_id, run.run_id)
    except Conflict:
        await env.commit(expiry.swept(run, sweep_at=env.now() + _NEEDED_S))
        return False
    return True


async def _is_all_of_job(env: Env, job: Job, run: Run) -> bool:
    """Whether nothing would be left of the job: a scheduled one has its list and its rule."""
    if job.type is JobType.SCHEDULED:
        return False
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, limit=2)
    return [each.run_id for each in await env.store.find(query)] == [run.run_id]
