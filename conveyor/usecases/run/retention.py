"""Expiry: results are kept for some time after the end of their run, then their bodies are removed
(SPEC.md 4.20).

A result expires with the run that produced it, also where a rerun has inherited it. It expires
earlier if its body is `body_days` old, because a bucket removes bodies by age, whatever their run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

import msgspec

from conveyor.domain import limits
from conveyor.domain.changes import Change, Guard, JobKey, RunKey, Update
from conveyor.domain.errors import Conflict, InvalidArgument, ResultExpired
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE
from conveyor.domain.model import Job, JobType, Run, Task
from conveyor.domain.queries import DueExpiries, RunsOf
from conveyor.usecases.context import Context
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs

# Runs per sweep. The rest stays due for the next sweep.
_PAGE = 100
_DAY_S = 86_400.0


class ResultExpiry(msgspec.Struct, frozen=True):
    """The instants at which the results of a run expire, by the run that produced them, evaluated
    at the time `at`. No body is older than `body_s`."""

    run_id: RunId
    instants: dict[RunId, float]
    body_s: float
    at: float

    def instant_of(self, task: Task) -> float:
        """Returns the instant at which the body of the task expires, if it has one."""
        with_its_run = self.instants.get(task.source_run_id or self.run_id, inf)
        return min(with_its_run, _stored_after(task) + self.body_s)

    def is_over(self, task: Task) -> bool:
        """Returns whether the task had a body that has expired."""
        return task.result is not None and self.instant_of(task) <= self.at


async def expiries_of(env: Context, run: Run) -> ResultExpiry:
    made = [run]
    for source_run_id in run.source_run_ids:
        source = await env.store.read(RunKey(run.job_id, source_run_id))
        if source is not None:
            made.append(source)
    instants = {each.run_id: each.expires_at for each in made if each.expires_at is not None}
    return ResultExpiry(run.run_id, instants, _body_s(env), env.now())


def _stored_after(task: Task) -> float:
    """Returns the start of the attempt that fetched the body. The bucket counts from the later time
    of the upload, so it never removes a body before this module expects it. A rerun inherits the
    history with the result."""
    return task.history[-1].started_at if task.history else task.created_at


def _body_s(env: Context) -> float:
    return env.policy.body_days * _DAY_S


def ttl_days(env: Context, asked: int | None) -> int:
    """Returns for how many days the results of a job are kept. Raises InvalidArgument for more than
    `body_days`."""
    days_max = env.policy.body_days
    if asked is None:
        return min(limits.RESULT_TTL_DAYS, days_max)
    if asked > days_max:
        raise InvalidArgument(
            f"This server keeps bodies for at most {days_max} days: result_ttl_days must be "
            f"from 1 to {days_max}.",
            pointer="/result_ttl_days",
        )
    return asked


def run_instant(env: Context, run: Run) -> float | None:
    """Returns when the last own result of the run expires; None while the run is live."""
    if run.expires_at is None or run.ended_at is None:
        return run.expires_at
    return min(run.expires_at, run.ended_at + _body_s(env))


def refuse_expired(expiries: ResultExpiry, task: Task) -> None:
    if expiries.is_over(task):
        raise ResultExpired(f"The result was kept until {_shown(expiries.instant_of(task))}.")


def refuse_expired_run(env: Context, run: Run) -> None:
    instant = run_instant(env, run)
    if instant is not None and instant <= env.now():
        raise ResultExpired(f"The results of the run were kept until {_shown(instant)}.")


async def sweep_expired(env: Context) -> int:
    """Removes the bodies of expired runs. Their rows stay for `row_days` and show the expiry."""
    due = await env.store.find(DueExpiries(due_by=env.now(), limit=_PAGE))
    with_bodies = [run for run in due if not is_old(env, run)]
    for run in with_bodies:
        # Bodies before the row's change: a crash in between repeats the removal, which is harmless.
        await env.blobs.delete_prefix(f"jobs/{run.job_id}/runs/{run.run_id}")
        await env.commit(swept(run, sweep_at=_rows_until(env, run)))
    return len(with_bodies)


def is_old(env: Context, run: Run) -> bool:
    """Returns whether the rows of the run have expired too."""
    until = _rows_until(env, run)
    return until is not None and until <= env.now()


def _rows_until(env: Context, run: Run) -> float | None:
    return None if run.expires_at is None else run.expires_at + env.policy.row_days * _DAY_S


def swept(run: Run, *, sweep_at: float | None) -> Change:
    """Builds the change that schedules the next check of the run at `sweep_at`."""
    guard = Guard(equals=(("sweep_at", run.sweep_at),))
    return Change((Update(RunKey(run.job_id, run.run_id), guard, {"sweep_at": sweep_at}),))


def _shown(instant: float) -> str:
    return datetime.fromtimestamp(int(instant), UTC).isoformat().replace("+00:00", "Z")


# Retention: `row_days` after its results have expired, a run is deleted (SPEC.md 4.20).
#
# It takes the path of any deletion: the run alone, or its job if no other run is left.


# A run whose results other runs have inherited is kept as long as they are. This is how often that
# is checked.
_NEEDED_S = 86_400.0


async def remove_old_rows(env: Context) -> int:
    """Deletes runs whose results expired `row_days` ago. Returns how many."""
    due = await env.store.find(DueExpiries(due_by=env.now(), limit=_PAGE))
    old = [run for run in due if is_old(env, run)]
    return sum([await _remove(env, run) for run in old])


async def _remove(env: Context, run: Run) -> bool:
    job = await env.store.read(JobKey(run.job_id))
    if job is None or job.status not in JOB_VISIBLE:
        # The deletion of the job also removes this run.
        await env.commit(swept(run, sweep_at=None))
        return False
    try:
        if await _is_all_of_job(env, job, run):
            await jobs.delete(env, job.caller, job.job_id)
        else:
            await runs.delete_run(env, job.caller, job.job_id, run.run_id)
    except Conflict:
        await env.commit(swept(run, sweep_at=env.now() + _NEEDED_S))
        return False
    return True


async def _is_all_of_job(env: Context, job: Job, run: Run) -> bool:
    """Returns whether the run is all that the job has. A scheduled job also has its list and its
    rule."""
    if job.type is JobType.SCHEDULED:
        return False
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, limit=2)
    return [each.run_id for each in await env.store.find(query)] == [run.run_id]
