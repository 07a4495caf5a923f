"""Open jobs: add a list of tasks, and close the job (SPEC.md 4.1).

Adding and closing exclude each other on the job's row: of two concurrent requests one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from conveyor.domain.changes import Applied, BatchKey, RunKey
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import BatchId, CallerId
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    IngestStatus,
    Job,
    JobStatus,
    JobType,
    Run,
    StagedList,
    Task,
)
from conveyor.domain.quota import BAD_TASK_BYTES, GROWTH_FREE_BYTES, GROWTH_MAX
from conveyor.domain.run import termination
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import AdmissionMode
from conveyor.domain.submit.task_validation import TaskDraft
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import latest_run, load_owned_job, require_latest_run, totals_of
from conveyor.usecases.optimistic import AGAIN, Again, retry_or_refuse
from conveyor.usecases.run import ingest, runs
from conveyor.usecases.submit import staging
from conveyor.usecases.submit.jobs import Accepted
from conveyor.usecases.submit.staging import OnInvalid, StagedTasks


async def add_tasks(
    env: Context,
    caller: CallerId,
    job_id: str,
    drafts: Sequence[TaskDraft] | StagedTasks,
    *,
    is_last: bool,
    batch_id: BatchId,
    on_invalid: OnInvalid = OnInvalid.REJECT,
) -> Accepted:
    """Admits one more list. If a batch with this id exists, finishes that batch instead."""
    job, run = await _fed_run(env, caller, job_id)
    # First: a repeated request must find its batch even if the job was closed since.
    begun = await env.store.read(BatchKey(job.job_id, run.run_id, batch_id))
    if begun is None:
        _refuse_unless_open(job, run)
        if not drafts:
            raise InvalidArgument("Give at least one task, or use /close.", pointer="/tasks")
        batch, tasks = await _batch_of(env, job, run, drafts, batch_id, on_invalid)
        begun = await _admit(env, job, run, batch, tasks, is_last=is_last)
    elif begun.status is BatchStatus.OPEN and not _is_later(env, begun):
        begun = await ingest.acquire_batch(env, begun) or begun
    return await _answer(env, job, run, begun)


async def find_batch(
    env: Context, caller: CallerId, job_id: str, batch_id: BatchId
) -> Batch | None:
    """Returns the batch with this id, if an earlier attempt of the request created it."""
    job, run = await _fed_run(env, caller, job_id)
    return await env.store.read(BatchKey(job.job_id, run.run_id, batch_id))


async def refuse_growth(
    env: Context, caller: CallerId, job_id: str, drafts: Sequence[TaskDraft], *, bytes_sent: int
) -> None:
    """Raises GrowsTooMuch for a list that needs far more storage than its request had bytes. Only a
    list that could be one is checked, because the check validates every line."""
    if len(drafts) * BAD_TASK_BYTES > max(GROWTH_MAX * bytes_sent, GROWTH_FREE_BYTES):
        job = await load_owned_job(env, caller, job_id)
        await staging.check_tasks(env, job, drafts, OnInvalid.SKIP, bytes_sent=bytes_sent)


async def place_for(
    env: Context, caller: CallerId, job_id: str, batch_id: BatchId
) -> tuple[Job, StagedList]:
    """Returns the job and the key under which a long list for it is staged. Raises if the list
    would be refused."""
    job, run = await _fed_run(env, caller, job_id)
    if await env.store.read(BatchKey(job.job_id, run.run_id, batch_id)) is None:
        _refuse_unless_open(job, run)
    return job, staging.staging_key(env, job, run.run_id, batch_id)


async def _fed_run(env: Context, caller: CallerId, job_id: str) -> tuple[Job, Run]:
    job = await load_owned_job(env, caller, job_id)
    _refuse_scheduled(job)
    return job, await require_latest_run(env, job)


def _refuse_scheduled(job: Job) -> None:
    if job.type is JobType.SCHEDULED:
        raise Conflict("The list of a scheduled job is fixed.", code="job_not_open")


def _refuse_unless_open(job: Job, run: Run) -> None:
    if run.last_batch_received and job.status is JobStatus.CLOSED and run.sequence == 1:
        raise Conflict("The last batch of this job was received.", code="last_batch_received")
    if job.status is not JobStatus.OPEN:
        raise Conflict("The job is closed: it takes no more tasks.", code="job_not_open")
    # Lists are added to the first run only; a rerun is over the tasks of the run before it.
    if run.sequence != 1 or run.stop_requested_at is not None or run.ended_at is not None:
        raise Conflict("The first run has ended: it takes no more tasks.", code="job_not_open")
    # Temporary, so the refusal has a `Retry-After` and is not stored under the Idempotency-Key.
    if run.ingest_status is IngestStatus.PENDING:
        raise Conflict(
            "The job's first list is still being ingested; try again when it is done.",
            code="run_not_terminal",
            retry_after_s=5,
        )


async def _batch_of(
    env: Context,
    job: Job,
    run: Run,
    drafts: Sequence[TaskDraft] | StagedTasks,
    batch_id: BatchId,
    on_invalid: OnInvalid,
) -> tuple[Batch, list[Task]]:
    """Returns the batch, and its tasks if they go into the same transaction."""
    now = env.now()
    if isinstance(drafts, StagedTasks):
        return admission.make_batch(run, batch_id, drafts.source, total=drafts.total, now=now), []
    specs = await staging.check_tasks(env, job, drafts, on_invalid)
    tasks: list[Task] = []
    source = None
    if env.policy.path_for(len(specs)) is AdmissionMode.AT_ONCE:
        tasks = admission.make_tasks(specs, (run.run_id, batch_id), run, now)
    else:
        # Staged before the batch that names it is committed, so that an accepted list is always
        # durable.
        source = await staging.stage(env, job.job_id, run.run_id, batch_id, specs)
    return admission.make_batch(run, batch_id, source, total=len(specs), now=now), tasks


async def _admit(
    env: Context, job: Job, run: Run, batch: Batch, tasks: list[Task], *, is_last: bool
) -> Batch:
    change = admission.add_batch(job, run, batch, tasks, is_last=is_last, now=batch.created_at)
    if isinstance(await env.commit(change), Applied):
        return batch
    # Refused: either a concurrent attempt of this request added the batch, or the job was closed.
    existing = await env.store.read(BatchKey(job.job_id, run.run_id, batch.batch_id))
    if existing is not None:
        return existing
    raise Conflict("The job was closed meanwhile: it takes no more tasks.", code="job_not_open")


async def _answer(env: Context, job: Job, run: Run, batch: Batch) -> Accepted:
    is_later = batch.status is BatchStatus.OPEN and _is_later(env, batch)
    if is_later:
        await env.signals.batch_opened(job.job_id, run.run_id)
    elif batch.status is BatchStatus.OPEN:
        await ingest.ingest_batch(env, batch)
    # All lines may be invalid, or all tasks may have ended already; then no later settle checks.
    await runs.complete_if_done(env, job.job_id, run.run_id)
    await env.signals.run_changed(job.job_id, run.run_id)
    job = await load_owned_job(env, job.caller, job.job_id)
    current = await env.store.read(RunKey(job.job_id, run.run_id)) or run
    return Accepted(job, current, await totals_of(env, current), batch.total, is_later)


def _is_later(env: Context, batch: Batch) -> bool:
    return env.policy.path_for(batch.total) is AdmissionMode.LATER


async def close(env: Context, caller: CallerId, job_id: str) -> Job:
    """Closes the job for further tasks. Checks for completion, because no later settle may do
    so."""
    return await retry_or_refuse("The job is", partial(_try_close, env, caller, job_id))


async def _try_close(env: Context, caller: CallerId, job_id: str) -> Job | Again:
    job = await load_owned_job(env, caller, job_id)
    _refuse_scheduled(job)
    if job.status is not JobStatus.OPEN:
        return job
    run = await latest_run(env, job)
    if run is None:
        # The next attempt finds the job closed, by this call or another, and returns it.
        await env.commit(termination.close_ended(job, now=env.now()))
        return AGAIN
    change = termination.close(job, run, now=env.now())
    if isinstance(await env.commit(change), Applied):
        await runs.complete_if_done(env, job.job_id, run.run_id)
        await env.signals.run_changed(job.job_id, run.run_id)
        return await load_owned_job(env, caller, job_id)
    # `close` requires a live run. For an ended run only the job's row changes.
    if run.ended_at is not None:
        await env.commit(termination.close_ended(job, now=env.now()))
    return AGAIN
