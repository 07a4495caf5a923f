"""Jobs: submit and delete (SPEC.md 4.1).

A submit takes the id of the job as an argument: a repeated request with the same id finds what the
first attempt stored and finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from conveyor.domain import lifecycle, limits
from conveyor.domain.budget import BudgetCap
from conveyor.domain.changes import Applied, BatchKey, Change, Guard, JobKey, RunKey, Stale, Update
from conveyor.domain.errors import Conflict, InvalidArgument, NotFound
from conveyor.domain.ids import FIRST_BATCH, BatchId, CallerId, JobId, RunId, pin_shard_count
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    HostLimits,
    IngestStatus,
    Job,
    JobStatus,
    JobType,
    Run,
    StagedList,
    Task,
    TaskSpec,
    Totals,
    Webhook,
)
from conveyor.domain.run import termination
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import AdmissionMode, Secrets, TaskDraft, grows_too_much
from conveyor.domain.submit.scraper_params import Params, derive_format
from conveyor.usecases import budget as budgets
from conveyor.usecases.context import AGAIN, Again, Context, retry_or_refuse
from conveyor.usecases.lookup import (
    is_tombstone,
    latest_run,
    load_owned_job,
    require_latest_run,
    totals_of,
)
from conveyor.usecases.run import ingest, results, runs
from conveyor.usecases.submit import duplicates, staging, upload
from conveyor.usecases.submit.staging import OnInvalid, StagedTasks


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the caller requests it, with its own fields validated. Its list is in `drafts`, is
    already staged, or was uploaded to the file input `input_id`."""

    drafts: Sequence[TaskDraft] = ()
    staged: StagedTasks | None = None
    input_id: str | None = None
    on_invalid: OnInvalid = OnInvalid.REJECT
    is_open: bool = False
    params: Params = Params({}, None)
    external_id: str | None = None
    name: str | None = None
    metadata: dict[str, str] | None = None
    webhook: Webhook | None = None
    max_inflight: int | None = None
    max_attempts: int | None = None
    priority: int = 1
    result_ttl_days: int | None = None
    budget: BudgetCap | None = None
    host_limits: HostLimits | None = None
    dedup: bool = False
    api_key: str | None = None
    task_token: str | None = None
    bytes_sent: int | None = None

    @property
    def inline_count(self) -> int:
        """The number of lines in the request itself."""
        return len(self.drafts) if self.staged is None else self.staged.total


class Accepted(msgspec.Struct, frozen=True):
    """A durable list. `is_later` is True if its rows appear after the response."""

    job: Job
    run: Run
    totals: Totals
    accepted: int
    is_later: bool


async def submit(env: Context, caller: CallerId, request: Submission, *, job_id: JobId) -> Accepted:
    """Creates the job and its first run. If they exist, finishes what an earlier attempt began."""
    refuse_empty(request)
    if request.budget is not None:
        budgets.check_cap(env, request.budget)
    job = job_from(env, caller, request, job_id)
    # Before the list is validated and staged: a repeated request needs neither.
    existing = await env.store.read(JobKey(job_id))
    if existing is not None and existing.caller == caller:
        return await _resume(env, existing)
    if request.input_id is not None:
        return await _admit_upload(env, job, request.input_id)
    if request.staged is not None:
        return await _admit_staged(env, job, request.staged.source, request.staged.total)
    # Only lists in the request are validated here. A staged list was validated while it arrived,
    # and an uploaded one is validated by ingest.
    specs = await staging.check_tasks(
        env, job, request.drafts, request.on_invalid, bytes_sent=request.bytes_sent
    )
    return await _admit_list(env, job, specs)


def refuse_empty(request: Submission) -> None:
    if not request.is_open and not request.inline_count and request.input_id is None:
        raise InvalidArgument("A closed job needs at least one task.", pointer="/tasks")


async def _admit_upload(env: Context, job: Job, input_id: str) -> Accepted:
    """Admits an uploaded list. It is always ingested after the response, however short it is."""
    source, total = await upload.take(env, job, first_run(env, job).run_id, input_id)
    # The number of lines is known only now, and the shard count is pinned by it.
    job = with_shards_for(env, job, total)
    run = msgspec.structs.replace(
        first_run(env, job), planned=total, open_batches=1, ingest_status=IngestStatus.PENDING
    )
    batch = admission.make_batch(run, FIRST_BATCH, source, total=total, now=job.created_at)
    return await _admit(env, job, run, batch, [])


async def _admit_list(env: Context, job: Job, specs: list[TaskSpec]) -> Accepted:
    run, total = first_run(env, job), len(specs)
    if env.config.path_for(total) is not AdmissionMode.AT_ONCE:
        source = await staging.stage(env, job.job_id, run.run_id, FIRST_BATCH, specs)
        return await _admit_staged(env, job, source, total)
    run = msgspec.structs.replace(run, planned=total, total=total)
    tasks = _make_tasks(env, job, run, specs, FIRST_BATCH, now=job.created_at)
    batch: Batch | None = None
    if specs:
        batch = admission.make_batch(run, FIRST_BATCH, None, total=total, now=job.created_at)
    return await _admit(env, job, run, batch, tasks)


def _make_tasks(
    env: Context, job: Job, run: Run, specs: list[TaskSpec], batch_id: BatchId, *, now: float
) -> list[Task]:
    """Returns the tasks of a whole list that is stored in one change."""
    origin = (run.run_id, batch_id)
    identities = duplicates.identities_of_list(env, job, specs, origin) if job.dedup else None
    return admission.make_tasks(specs, origin, run, now, identities)


async def _admit_staged(env: Context, job: Job, source: StagedList, total: int) -> Accepted:
    is_later = env.config.path_for(total) is AdmissionMode.LATER
    run = msgspec.structs.replace(
        first_run(env, job),
        planned=total,
        open_batches=1,
        ingest_status=IngestStatus.PENDING if is_later else None,
    )
    batch = admission.make_batch(run, FIRST_BATCH, source, total=total, now=job.created_at)
    return await _admit(env, job, run, batch, [])


async def _admit(
    env: Context, job: Job, run: Run, batch: Batch | None, tasks: list[Task]
) -> Accepted:
    verdict = await env.commit_with_events(admission.new_job(job, run, batch, tasks))
    if isinstance(verdict, Stale):
        # A concurrent attempt with the same id was faster: finish its job instead.
        existing = await env.store.read(JobKey(job.job_id))
        assert existing is not None
        assert existing.caller == job.caller, "a job id of another caller was minted"
        return await _resume(env, existing)
    return await _finish_submit(env, job, run, batch)


async def _resume(env: Context, job: Job) -> Accepted:
    """Finishes a job that another attempt of the same request has created, earlier or
    concurrently."""
    job = await load_owned_job(env, job.caller, job.job_id)
    run = await require_latest_run(env, job)
    batch = await env.store.read(BatchKey(job.job_id, run.run_id, FIRST_BATCH))
    # Acquire the batch: the epoch fences off the attempt that created it, which may still be
    # running.
    if batch is not None and batch.status is BatchStatus.OPEN and run.ingest_status is None:
        batch = await ingest.acquire_batch(env, batch) or batch
    return await _finish_submit(env, job, run, batch)


async def _finish_submit(env: Context, job: Job, run: Run, batch: Batch | None) -> Accepted:
    """Does what follows the commit: ingests a list that is too long for the commit, or leaves it to
    a worker, signals the workers, and completes a run of which every line has failed already."""
    is_later = run.ingest_status is not None
    if is_later:
        await env.signals.batch_opened(job.job_id, run.run_id)
    elif batch is not None and batch.status is BatchStatus.OPEN:
        await ingest.ingest_batch(env, batch)
    await env.signals.run_changed(job.job_id, run.run_id, run.planned)
    current = await env.store.read(RunKey(job.job_id, run.run_id)) or run
    totals = await totals_of(env, current)
    # Invalid lines have failed already. If all lines are invalid, no settle checks for completion.
    if totals.done:
        await runs.complete_if_done(env, job.job_id, run.run_id)
        current = await env.store.read(RunKey(job.job_id, run.run_id)) or run
    accepted = batch.total if batch is not None else 0
    return Accepted(job, current, totals, accepted, is_later)


def job_from(env: Context, caller: CallerId, request: Submission, job_id: JobId) -> Job:
    """Builds the row of the requested job, with an id for its first run."""
    now = env.now()
    staged = request.staged
    # The key of a staged list contains the run id that was chosen when staging began.
    run_id = RunId(env.new_id()) if staged is None else staged.source.origin_run_id
    headers, key, token = request.params.headers, request.api_key, request.task_token

    def seal(field: str, secrets: Secrets) -> str | None:
        if secrets == Secrets():
            return None
        return staging.seal_secrets(env, caller, job_id, field, secrets)

    job = Job(
        job_id=job_id,
        caller=caller,
        status=JobStatus.OPEN if request.is_open else JobStatus.CLOSED,
        created_at=now,
        updated_at=now,
        format=derive_format(request.params.values),
        params=request.params.values,
        headers_sealed=seal("headers", Secrets(headers=headers or None)),
        auth_sealed=seal("auth", Secrets(body=key.encode() if key else None)),
        external_id=request.external_id,
        name=request.name,
        metadata=request.metadata,
        webhook=request.webhook,
        max_inflight=request.max_inflight or env.config.max_inflight,
        max_attempts=request.max_attempts or limits.MAX_ATTEMPTS,
        priority=request.priority,
        result_ttl_days=results.ttl_days(env, request.result_ttl_days),
        # The first run is created in the same change as the job, so the row already names it.
        runs_count=1,
        latest_run_id=run_id,
        active_run_id=run_id,
        budget=request.budget,
        host_limits=request.host_limits,
        dedup=request.dedup,
        task_token_sealed=seal("task_token", Secrets(body=token.encode() if token else None)),
    )
    return with_shards_for(env, job, request.inline_count)


def with_shards_for(env: Context, job: Job, tasks_count: int) -> Job:
    shard_count = pin_shard_count(
        tasks_count=tasks_count,
        is_open=job.status is JobStatus.OPEN,
        configured=env.config.shard_count,
        sync_max=env.config.sync_tasks_max,
    )
    return msgspec.structs.replace(job, shard_count=shard_count)


def first_run(env: Context, job: Job) -> Run:
    assert job.latest_run_id is not None
    run = admission.make_run_row(job, job.latest_run_id, sequence=1, now=job.created_at)
    return msgspec.structs.replace(run, last_batch_received=job.status is JobStatus.CLOSED)


async def delete(env: Context, caller: CallerId, job_id: str) -> None:
    """Hides the job at once: every later read returns 404. The rest is removed in the background,
    in passes.

    A repeated request succeeds for as long as the tombstone exists.
    """
    await retry_or_refuse("The job is", partial(_try_delete, env, caller, job_id))
    env.seen_runs.forget(caller, job_id)


async def _try_delete(env: Context, caller: CallerId, job_id: str) -> Again | None:
    if await is_tombstone(env, caller, job_id):
        return None
    job = await load_owned_job(env, caller, job_id)
    active = None
    if job.active_run_id is not None:
        active = await env.store.read(RunKey(job.job_id, job.active_run_id))
    change = termination.delete_job(job, active, intent_id=env.new_id(), now=env.now())
    if not isinstance(await env.commit_with_events(change), Applied):
        return AGAIN
    if active is not None:
        # After the commit: a refused deletion must not stop the work.
        await env.signals.teardown(job.job_id, active.run_id, deadline_s=env.config.teardown_s)
        await env.queue.close_run(active.run_id)
    return None


# Open jobs: add a list of tasks, and close the job (SPEC.md 4.1).
#
# Adding and closing exclude each other on the job's row: of two concurrent requests one is refused.


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
    existing = await env.store.read(BatchKey(job.job_id, run.run_id, batch_id))
    if existing is None:
        _refuse_unless_open(job, run)
        if not drafts:
            raise InvalidArgument("Give at least one task, or use /close.", pointer="/tasks")
        batch, tasks = await _batch_of(env, job, run, drafts, batch_id, on_invalid)
        existing = await _admit_batch(env, job, run, batch, tasks, is_last=is_last)
    elif existing.status is BatchStatus.OPEN and not _is_later(env, existing):
        existing = await ingest.acquire_batch(env, existing) or existing
    return await _finish_batch(env, job, run, existing)


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
    if grows_too_much(bytes_sent, tasks_count=len(drafts), bad_count=len(drafts)):
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
        raise Conflict(
            "The job is closed: its last batch was received.", code="last_batch_received"
        )
    if job.status is not JobStatus.OPEN:
        raise Conflict("The job is closed: it takes no more tasks.", code="job_not_open")
    if not lifecycle.accepts_lists(run):
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
    if env.config.path_for(len(specs)) is AdmissionMode.AT_ONCE:
        tasks = _make_tasks(env, job, run, specs, batch_id, now=now)
    else:
        # Staged before the batch that names it is committed, so that an accepted list is always
        # durable.
        source = await staging.stage(env, job.job_id, run.run_id, batch_id, specs)
    return admission.make_batch(run, batch_id, source, total=len(specs), now=now), tasks


async def _admit_batch(
    env: Context, job: Job, run: Run, batch: Batch, tasks: list[Task], *, is_last: bool
) -> Batch:
    change = admission.add_batch(job, run, batch, tasks, is_last=is_last, now=batch.created_at)
    if isinstance(await env.commit_with_events(change), Applied):
        return batch
    # Refused: either a concurrent attempt of this request added the batch, or the job was closed.
    existing = await env.store.read(BatchKey(job.job_id, run.run_id, batch.batch_id))
    if existing is not None:
        return existing
    raise Conflict("The job was closed meanwhile: it takes no more tasks.", code="job_not_open")


async def _finish_batch(env: Context, job: Job, run: Run, batch: Batch) -> Accepted:
    is_later = batch.status is BatchStatus.OPEN and _is_later(env, batch)
    if is_later:
        await env.signals.batch_opened(job.job_id, run.run_id)
    elif batch.status is BatchStatus.OPEN:
        await ingest.ingest_batch(env, batch)
    # All lines may be invalid, or all tasks may have ended already; then no later settle checks.
    await runs.complete_if_done(env, job.job_id, run.run_id)
    await env.signals.run_changed(job.job_id, run.run_id, run.planned + batch.total)
    job = await load_owned_job(env, job.caller, job.job_id)
    current = await env.store.read(RunKey(job.job_id, run.run_id)) or run
    return Accepted(job, current, await totals_of(env, current), batch.total, is_later)


def _is_later(env: Context, batch: Batch) -> bool:
    return env.config.path_for(batch.total) is AdmissionMode.LATER


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
        await env.commit_with_events(termination.close_ended(job, now=env.now()))
        return AGAIN
    change = termination.close(job, run, now=env.now())
    if isinstance(await env.commit_with_events(change), Applied):
        await runs.complete_if_done(env, job.job_id, run.run_id)
        await env.signals.run_changed(job.job_id, run.run_id)
        return await load_owned_job(env, caller, job_id)
    # `close` requires a live run. For an ended run only the job's row changes.
    if run.ended_at is not None:
        await env.commit_with_events(termination.close_ended(job, now=env.now()))
    return AGAIN


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
