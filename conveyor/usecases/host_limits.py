"""Changes the host limits of a job, for the runs that start afterwards (SPEC.md 4.8)."""

from __future__ import annotations

from conveyor.domain.changes import Applied, Change, Guard, JobKey, Update
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import CallerId
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import HostLimits, Job
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job


async def set_host_limits(
    env: Context, caller: CallerId, job_id: str, host_limits: HostLimits | None
) -> Job:
    """A live run keeps the limits that it started with."""
    job = await load_owned_job(env, caller, job_id)
    values = {"host_limits": host_limits, "updated_at": env.now()}
    update = Update(JobKey(job.job_id), Guard(status_in=JOB_VISIBLE), values)
    if not isinstance(await env.commit(Change((update,))), Applied):
        raise NotFound("There is no such job.")
    return await load_owned_job(env, caller, job_id)
