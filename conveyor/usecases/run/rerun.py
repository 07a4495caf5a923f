"""Reruns: a new run over all or some tasks of the latest run, and the count of matching tasks
(SPEC.md 4.18).

A rerun takes its run id as an argument: a repeated request finds the run and finishes it.
"""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from conveyor.domain import schedule_trigger
from conveyor.domain.changes import Applied, RunKey, ScheduleKey
from conveyor.domain.errors import Conflict, NotFound
from conveyor.domain.ids import FIRST_BATCH, CallerId, RunId
from conveyor.domain.lifecycle import RUN_LIVE, RUN_VISIBLE, TASK_TERMINAL, TASK_UNFINISHED
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    FailureReason,
    IngestStatus,
    Job,
    JobType,
    RowsOf,
    Run,
    Source,
    Task,
    TaskStatus,
    Totals,
)
from conveyor.domain.queries import BatchesOf, TasksOf
from conveyor.domain.run import ingestion
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import AdmissionMode
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import latest_run, load_owned_job, pages_of, totals_of
from conveyor.usecases.run import ingest, runs

EVERY_STATUS = frozenset(TaskStatus)


class RerunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that start over: those that match all given filters. None matches every task."""

    retry: frozenset[TaskStatus] | None = None
    reasons: frozenset[FailureReason] | None = None
    hosts: frozenset[str] | None = None

    @property
    def is_everything(self) -> bool:
        return self == RerunFilter()

    def of(self, run: Run) -> RowsOf:
        retry = EVERY_STATUS if self.retry is None else self.retry
        return RowsOf(run_id=run.run_id, retry=retry, reasons=self.reasons, hosts=self.hosts)


class RerunCount(msgspec.Struct):
    """How many tasks the filter matches, and how many start over: unfinished tasks always do."""

    named: int = 0
    restarted: int = 0


async def count_matching(env: Context, run: Run, source: RowsOf) -> RerunCount:
    """Counts the matching tasks exactly. The counters suffice unless hosts are given, which only
    the rows contain."""
    if source.hosts is None:
        chosen = _count_from(await totals_of(env, run), run, source)
    else:
        chosen = RerunCount()
        async with aclosing(pages_of(env, run)) as pages:
            async for page in pages:
                for row in page:
                    count_row(chosen, row, source)
    if not chosen.named:
        raise Conflict("No task of the latest run matches the filter.", code="no_matching_tasks")
    return chosen


def count_row(chosen: RerunCount, row: Task, source: RowsOf) -> bool:
    """Counts a row. Returns whether its task starts over."""
    is_named = ingestion.matches_filter(row, source)
    is_restarted = is_named or row.status in TASK_UNFINISHED
    chosen.named += is_named
    chosen.restarted += is_restarted
    return is_restarted


def _count_from(totals: Totals, run: Run, source: RowsOf) -> RerunCount:
    """Counts from the counters. All unfinished tasks of an ended run count as pending, whatever
    their rows contain."""
    unfinished = run.total - totals.done
    counts = {
        TaskStatus.SUCCESSFUL: totals.successful,
        TaskStatus.FAILED: totals.failed,
        TaskStatus.PENDING: unfinished,
    }
    # Only failed tasks have a reason.
    if source.reasons is not None:
        counts = {
            TaskStatus.FAILED: sum(totals.reasons.get(reason, 0) for reason in source.reasons)
        }
    named = {status: counts.get(status, 0) for status in source.retry}
    ended = sum(count for status, count in named.items() if status in TASK_TERMINAL)
    return RerunCount(named=sum(named.values()), restarted=ended + unfinished)


# Starting a rerun (SPEC.md 4.18).


class Rerun(msgspec.Struct, frozen=True):
    """A new durable run, with the numbers of tasks that start over and that are inherited."""

    job: Job
    run: Run
    totals: Totals
    rerun_of: RunId | None
    retried: int
    inherited: int
    is_later: bool


async def rerun(
    env: Context,
    caller: CallerId,
    job_id: str,
    *,
    run_id: RunId,
    retry: frozenset[TaskStatus] | None = None,
    reasons: frozenset[FailureReason] | None = None,
    hosts: frozenset[str] | None = None,
) -> Rerun:
    """Starts run `run_id`, or finds and finishes it. Without a filter, all tasks start over."""
    job = await load_owned_job(env, caller, job_id)
    # First: a repeated request must not be refused by checks that its own first attempt has made
    # fail.
    existing = await env.store.read(RunKey(job.job_id, run_id))
    if existing is not None:
        return await _resume(env, job, existing)
    choice = RerunFilter(retry=retry, reasons=reasons, hosts=hosts)
    if choice.is_everything and job.type is JobType.SCHEDULED:
        return await _by_hand(env, job, run_id)
    previous = await ended_run(env, job, choice)
    if previous.open_batches:
        return await _from_sources(env, job, previous, run_id)
    return await _from_rows(env, job, previous, choice, run_id)


async def ended_run(env: Context, job: Job, choice: RerunFilter) -> Run:
    """Returns the run that such a rerun would repeat. Raises Conflict if there is none."""
    previous = await latest_run(env, job)
    if previous is None:
        raise Conflict("The job has no run that could be run again.", code="no_prior_run")
    _refuse_unended(previous)
    if previous.open_batches and not choice.is_everything:
        raise Conflict(
            "The latest run ended before its list was ingested; rerun it without a filter.",
            code="ingest_incomplete",
        )
    return previous


def _refuse_unended(previous: Run) -> None:
    if previous.status in RUN_LIVE or previous.status not in RUN_VISIBLE:
        raise Conflict(
            "The latest run has not ended; stop it first or wait for it.", code="run_not_terminal"
        )


async def _by_hand(env: Context, job: Job, run_id: RunId) -> Rerun:
    """Starts a run over the job's own list, as the schedule does."""
    previous = await latest_run(env, job)
    schedule = await env.store.read(ScheduleKey(job.job_id))
    if schedule is None:
        raise NotFound("There is no such job.")
    run, batch = schedule_trigger.make_run(job, schedule, run_id, now=env.now())
    if previous is not None:
        _refuse_unended(previous)
        run = msgspec.structs.replace(run, rerun_of=previous.run_id)
    return await _start(env, job, run, [batch], [])


async def _from_rows(
    env: Context, job: Job, previous: Run, choice: RerunFilter, run_id: RunId
) -> Rerun:
    source = choice.of(previous)
    retried = (await count_matching(env, previous, source)).restarted
    path = env.config.path_for(previous.total)
    run = _next_run(env, job, previous, run_id, path=path)
    run = msgspec.structs.replace(run, planned=previous.total, retried=retried)
    tasks: list[Task] = []
    # A short list goes into the transaction that creates the run, so no batch stays open.
    if path is AdmissionMode.AT_ONCE:
        rows = await _all_rows(env, previous)
        tasks = [ingestion.replay(row, run, source, run.created_at) for row in rows]
        inherited = {task.source_run_id for task in tasks if task.source_run_id}
        run = msgspec.structs.replace(
            run, total=previous.total, open_batches=0, source_run_ids=tuple(sorted(inherited))
        )
    batch = admission.make_batch(
        run,
        FIRST_BATCH,
        None if path is AdmissionMode.AT_ONCE else source,
        total=previous.total,
        now=run.created_at,
    )
    return await _start(env, job, run, [batch], tasks)


async def _from_sources(env: Context, job: Job, previous: Run, run_id: RunId) -> Rerun:
    """Starts over from the staged lists. The latest run ended before they were ingested, so its
    rows do not contain every line."""
    batches = await env.store.find(BatchesOf(job_id=job.job_id, run_id=previous.run_id))
    total = sum(batch.total for batch in batches)
    run = _next_run(env, job, previous, run_id, path=AdmissionMode.LATER)
    run = msgspec.structs.replace(run, planned=total, retried=total, open_batches=len(batches))
    renewed = [_batch_for(batch, run, previous) for batch in batches]
    return await _start(env, job, run, renewed, [])


def _batch_for(batch: Batch, run: Run, previous: Run) -> Batch:
    """Returns the batch for the new run: over the rows if all are there, otherwise over its source
    from the start."""
    source: Source | None = batch.source
    if source is None:
        source = RowsOf(run_id=previous.run_id, retry=EVERY_STATUS, batch_id=batch.batch_id)
    elif isinstance(source, RowsOf):  # The filter of the last rerun does not apply.
        source = msgspec.structs.replace(source, retry=EVERY_STATUS, reasons=None, hosts=None)
    return Batch(
        job_id=run.job_id,
        run_id=run.run_id,
        batch_id=batch.batch_id,
        status=BatchStatus.OPEN,
        source=source,
        total=batch.total,
        created_at=run.created_at,
        updated_at=run.created_at,
    )


async def _start(
    env: Context, job: Job, run: Run, batches: list[Batch], tasks: list[Task]
) -> Rerun:
    verdict = await env.commit_with_events(admission.new_run(job, run, batches, tasks))
    if not isinstance(verdict, Applied):
        # Refused: either an earlier attempt of this request created the run, or another rerun was
        # faster.
        existing = await env.store.read(RunKey(job.job_id, run.run_id))
        if existing is None:
            raise Conflict("Another run of this job was started.", code="run_not_terminal")
        run = existing
    return await _resume(env, await load_owned_job(env, job.caller, job.job_id), run)


async def _resume(env: Context, job: Job, run: Run) -> Rerun:
    if run.ingest_status is not None:
        await env.signals.batch_opened(run.job_id, run.run_id)
    else:
        for batch in await ingest.open_batches_of(env, run.job_id, run.run_id):
            taken = await ingest.acquire_batch(env, batch)
            if taken is not None:
                await ingest.ingest_batch(env, taken)
    await env.signals.run_changed(run.job_id, run.run_id, run.planned)
    current = await env.store.read(RunKey(run.job_id, run.run_id)) or run
    totals = await totals_of(env, current)
    if current.status in RUN_LIVE and not current.open_batches and totals.done == current.total:
        # All lines were invalid and have failed already. No settle will follow, so check for
        # completion here.
        await runs.complete_if_done(env, run.job_id, run.run_id)
        current = await env.store.read(RunKey(run.job_id, run.run_id)) or current
    return Rerun(
        job=job,
        run=current,
        totals=totals,
        rerun_of=run.rerun_of,
        # An uploaded list may have had fewer lines than its estimate.
        retried=min(run.retried, run.planned),
        inherited=max(0, run.planned - run.retried),
        is_later=run.ingest_status is not None,
    )


def _next_run(env: Context, job: Job, previous: Run, run_id: RunId, *, path: AdmissionMode) -> Run:
    run = admission.make_run_row(job, run_id, sequence=job.runs_count + 1, now=env.now())
    return msgspec.structs.replace(
        run,
        open_batches=1,
        last_batch_received=True,
        ingest_status=IngestStatus.PENDING if path is AdmissionMode.LATER else None,
        rerun_of=previous.run_id,
    )


async def _all_rows(env: Context, run: Run) -> list[Task]:
    query = TasksOf(
        job_id=run.job_id,
        run_id=run.run_id,
        shard_count=run.shard_count,
        limit=run.total,
    )
    return await env.store.find(query)
