"""Reconcile: finds operations that a crash interrupted and finishes them by the ordinary paths
(SPEC.md 4.14).

Each repair is small, reads in pages, is conditional on what it read, and is safe to repeat.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

import msgspec

from conveyor.domain import lifecycle, limits
from conveyor.domain.changes import Applied, Change, Delete, Guard, JobKey, RunKey, ScrubKey, Update
from conveyor.domain.errors import Conflict, Refused
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import (
    BATCH_UNFINISHED,
    JOB_VISIBLE,
    RUN_LIVE_STORED,
    RUN_TERMINAL,
    RUN_VISIBLE,
    TASK_UNFINISHED,
)
from conveyor.domain.model import (
    Batch,
    DeletionIntent,
    Job,
    JobType,
    Run,
    RunStatus,
    TaskRef,
    Totals,
)
from conveyor.domain.queries import BatchesIn, DueExpiries, DueScrubs, RunsIn, RunsOf
from conveyor.domain.run import ingestion, termination
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Depth
from conveyor.usecases import event_log
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import isolate
from conveyor.usecases.lookup import pages_of, totals_of
from conveyor.usecases.run import demand, ingest, run_progress, runs
from conveyor.usecases.run.demand import RunDemand
from conveyor.usecases.run.ingest import Ingested
from conveyor.usecases.submit import jobs, staging, upload

# Rows per query. A smaller page costs more calls, a larger one more memory.
_PAGE = 200
# How much one slice of a deletion removes before the claim is renewed. A slice must end well within
# DELETION_CLAIM_S, or another process takes the deletion over.
_DELETION_ROWS, _DELETION_BODIES = 2_000, 1_000
# How long one deletion continues before the next due one has its turn. With a larger value, one
# large job delays the deletions of all other callers.
_TURN_S = 10.0
# Runs that ended earlier are not checked for a remaining queue, after a start either.
_ENDED_LOOKBACK_S = 3600.0
# A process that creates a queue again reads the run's row afterwards, and removes the queue if the
# run has ended. This long after the end no process is between these two steps, so one removal is
# final.
_REOPENED_S = 60.0
# A run whose results other runs have inherited is kept as long as they are. This is how often that
# is checked.
_NEEDED_S = 86_400.0
# Runs with expired results per sweep. The rest stays due for the next sweep.
_EXPIRED_PAGE = 100
_DAY_S = 86_400.0
# Events younger than this are usually being numbered by the process that committed them.
_UNPLACED_S = 2.0


class SweepResult(msgspec.Struct):
    """The number of repairs of one sweep, and the demand of each live run."""

    completed: int = 0
    stopped: int = 0
    resent: int = 0
    demand: list[RunDemand] = []


async def stalled_batches(env: Context, *, idle_s: float) -> list[Batch]:
    """Returns open batches that no ingester has moved for `idle_s`."""
    statuses = BATCH_UNFINISHED
    query = BatchesIn(statuses=statuses, idle_since=env.now() - idle_s, limit=_PAGE)
    return await env.store.find(query)


async def finish_batch(env: Context, batch: Batch) -> Ingested:
    """Acquires a batch and ingests the rest of it. If its run has ended, the batch is abandoned."""
    taken = await ingest.acquire_batch(env, batch)
    if taken is None:
        return Ingested.FENCED
    try:
        return await ingest.ingest_batch(env, taken)
    except Unavailable:
        # An outage is not the fault of the list, so it must not count towards the attempts of the
        # batch.
        await env.commit(ingestion.undo_failure_count(taken))
        raise


async def sweep_runs(env: Context, drained: dict[RunId, Run] | None = None) -> SweepResult:
    """Checks every live run once, for missed completions, unfinished stops and lost messages, and
    samples its counters.

    `drained` has the open runs whose tasks had all ended at an earlier sweep, with their rows at
    that time. While the row is the same there is nothing to repair, and the run costs no read.
    """
    repairs = SweepResult()
    before, now_drained = drained or {}, {}
    after: RunId | None = None
    while True:
        page = await env.store.find(RunsIn(statuses=RUN_LIVE_STORED, after=after, limit=_PAGE))
        for run in page:
            repair = partial(_repair, env, run, repairs)
            if before.get(run.run_id) == run or (
                await isolate(repair, "a run", expects=(Refused,), extra={"run": run.run_id})
                is True
            ):
                now_drained[run.run_id] = run
        if len(page) < _PAGE:
            # Only after a complete pass: an interrupted one has not seen all runs.
            if drained is not None:
                drained.clear()
                drained.update(now_drained)
            return repairs
        after = page[-1].run_id


async def close_ended_queues(env: Context, *, last_at: float | None = None) -> float:
    """Removes the queues of ended runs, because a crash may fall between the end of a run and the
    removal of its queue. Each queue is removed once, some time after the end, and the row records
    it.

    `last_at` is the result of the last complete call: runs that ended well before are done.
    """
    now = env.now()
    since = now - _ENDED_LOOKBACK_S
    # A `last_at` in the future means that the clock was set back; then use the full lookback.
    if last_at is not None and last_at <= now:
        since = max(since, last_at - 2 * _REOPENED_S)
    after: RunId | None = None
    while True:
        query = RunsIn(statuses=RUN_TERMINAL, updated_since=since, after=after, limit=_PAGE)
        page = await env.store.find(query)
        for run in page:
            # An `updated_at` in the future gives a negative age, and the queue is closed at once.
            if not run.queue_closed and not 0 <= now - run.updated_at < _REOPENED_S:
                await isolate(
                    partial(_close_queue, env, run),
                    "a queue",
                    expects=(Refused,),
                    extra={"run": run.run_id},
                )
        if len(page) < _PAGE:
            return now
        after = page[-1].run_id


async def _close_queue(env: Context, run: Run) -> None:
    await env.queue.close_run(run.run_id)
    # After the removal: a crash in between repeats a removal, which is harmless.
    await env.commit(termination.note_queue_closed(run))


async def _repair(env: Context, run: Run, repairs: SweepResult) -> bool:
    """Repairs one run. Returns whether the run is open and all its tasks have ended."""
    if lifecycle.is_stopping(run):
        await env.signals.teardown(run.job_id, run.run_id, deadline_s=env.config.teardown_s)
        # A conflict means that other processes keep changing the row. The next sweep tries again.
        with suppress(Conflict):
            await runs.finish_stop(env, run.job_id, run.run_id)
            repairs.stopped += 1
    elif await runs.complete_if_done(env, run.job_id, run.run_id):
        repairs.completed += 1
    else:
        totals = await totals_of(env, run)
        await run_progress.store_sample(env, run, totals)
        if not run.open_batches and totals.admitted == totals.done == run.planned:
            return True
        depth = await env.queue.depth(run.run_id)
        if env.config.measures_demand:
            repairs.demand.append(await demand.of_run(env, run, depth))
        repairs.resent += await _resend(env, run, depth, totals)
    return False


async def _resend(env: Context, run: Run, depth: Depth, totals: Totals) -> int:
    """Sends the references of unfinished tasks again if their messages are lost.

    Messages count as lost only if the queue is empty, because a slow queue must not be flooded. A
    task in progress has a hidden message, so the queue of a run with running tasks is never empty.
    Duplicates would also keep it from becoming empty, for as long as their original has no message:
    so originals are sent again if fewer messages are hidden than tasks are unfinished, and none is
    left to receive. A queue may count too few, so that is one page a sweep at most.

    Nothing is sent while a batch is open: its rows may exist before they count, and a task that is
    not admitted must not end. If another process ends the run meanwhile, its queue is removed and
    nothing is left to send to.
    """
    if depth.visible or depth.hidden >= totals.admitted - totals.done:
        return 0
    is_empty = not depth.hidden
    if not is_empty and not await _shares_fetches(env, run):
        return 0
    if not await runs.ensure_queue(env, run.job_id, run.run_id):
        return 0
    sent = 0
    async with aclosing(pages_of(env, run, statuses=TASK_UNFINISHED)) as pages:
        async for page in pages:
            # Check before each page, not once: a batch may be opened during the walk.
            if await ingest.open_batches_of(env, run.job_id, run.run_id):
                break
            refs = [
                TaskRef(run.job_id, run.run_id, row.task_id, row.shard)
                for row in page
                if is_empty or row.duplicate_of is None
            ]
            try:
                await env.queue.send(refs)
            except QueueGone:
                break
            sent += len(refs)
            if sent and not is_empty:
                break
    return sent


async def _shares_fetches(env: Context, run: Run) -> bool:
    job = await env.store.read(JobKey(run.job_id))
    return job is not None and job.dedup


async def place_events(env: Context) -> int:
    """Numbers events whose process stopped before it numbered them."""
    return await event_log.number_orphans(env.store, env.news, before=env.now() - _UNPLACED_S)


async def delete_due(env: Context) -> bool:
    """Removes the rows and bodies of deleted jobs and runs. Each deletion has three passes, some
    time apart.

    A large deletion is interrupted after its turn, so that others are not delayed. Returns whether
    one was left unfinished in this way.
    """
    is_left = False
    for intent in await env.store.find(DueScrubs(due_by=env.now(), limit=_PAGE)):
        done = await isolate(
            partial(_delete_slice, env, intent),
            "a scrub",
            expects=(Refused,),
            extra={"scrub": intent.scrub_id},
        )
        is_left |= done is False
    await upload.remove_expired(env)
    await env.store.delete_expired(env.now())
    return is_left


async def _delete_slice(env: Context, intent: DeletionIntent) -> bool:
    """Continues one deletion for a turn. Returns True if it is done or another process has claimed
    it."""
    until_s = env.clock.steady() + _TURN_S
    taken = await _claim(env, intent, limits.DELETION_CLAIM_S)
    if taken is None:
        return True
    # Queues first, while the rows that name them still exist.
    if intent.run_id is None:
        await _close_queues(env, intent)
    else:
        await env.queue.close_run(intent.run_id)
    async with aclosing(_delete_slices(env, intent)) as bites:
        async for _ in bites:
            is_turn_over = env.clock.steady() >= until_s
            # A claim of 0 s at the end of the turn makes the deletion due again at once.
            taken = await _claim(env, taken, 0.0 if is_turn_over else limits.DELETION_CLAIM_S)
            if taken is None or is_turn_over:
                return taken is None
    await env.commit(_next_pass(env, taken))
    return True


async def _claim(env: Context, intent: DeletionIntent, claim_s: float) -> DeletionIntent | None:
    """Claims a deletion until the claim lapses; then it is due again, so a lost process costs only
    time. Returns None if another process was faster."""
    change = Change(
        (
            Update(
                ScrubKey(intent.scrub_id), _unchanged_guard(intent), {"due_at": env.now() + claim_s}
            ),
        )
    )
    verdict = await env.commit(change)
    if not isinstance(verdict, Applied):
        return None
    (row,) = verdict.rows
    assert isinstance(row, DeletionIntent)
    return row


def _unchanged_guard(intent: DeletionIntent) -> Guard:
    return Guard(equals=(("passes_left", intent.passes_left), ("due_at", intent.due_at)))


async def _delete_slices(env: Context, intent: DeletionIntent) -> AsyncGenerator[None, None]:
    """Deletes bodies, then rows, one slice per step, so that the claim can be renewed between
    steps."""
    for prefix in _prefixes(intent):
        while await env.blobs.delete_prefix(prefix, limit=_DELETION_BODIES):
            yield
    while await env.store.delete_run_rows(intent.job_id, intent.run_id, limit=_DELETION_ROWS):
        yield


def _prefixes(intent: DeletionIntent) -> list[str]:
    job = f"jobs/{intent.job_id}"
    if intent.run_id is None:
        return [job, f"sources/{intent.job_id}"]
    return [
        f"{job}/sources/{intent.run_id}",  # Lists of earlier releases.
        f"{job}/exports/{intent.run_id}",
        staging.sources_prefix(intent.job_id, intent.run_id),
        f"{job}/runs/{intent.run_id}",
    ]


async def _close_queues(env: Context, intent: DeletionIntent) -> None:
    """Removes the queues of all runs of the job, while the rows still name them."""
    before: int | None = None
    while True:
        query = RunsOf(
            job_id=intent.job_id, statuses=frozenset(RunStatus), before=before, limit=_PAGE
        )
        page = await env.store.find(query)
        for run in page:
            await env.queue.close_run(run.run_id)
        if len(page) < _PAGE:
            return
        before = page[-1].sequence


def _next_pass(env: Context, intent: DeletionIntent) -> Change:
    key, seen = ScrubKey(intent.scrub_id), _unchanged_guard(intent)
    # The second pass removes what a worker wrote during the first: a fetch that had begun can still
    # store its body until its deadline and claim end.
    if intent.passes_left > 1:
        values = {"due_at": env.now() + limits.SECOND_DELETION_PASS_S}
        return Change((Update(key, seen, values, {"passes_left": -1}),))
    # Until then the row of a deleted job is a tombstone, so that a repeated request still succeeds.
    # The last pass removes rows of kinds that are newer than the process that made the others.
    if intent.passes_left == 1:
        values = {"due_at": env.now() + limits.TOMBSTONE_TTL_S}
        return Change((Update(key, seen, values, {"passes_left": -1}),))
    tombstone = (Delete(JobKey(intent.job_id)),) if intent.run_id is None else ()
    return Change((Delete(key, seen), *tombstone))


# Retention: the bodies of expired results are removed, and `row_days` later their run is deleted
# (SPEC.md 4.20). That takes the path of any deletion: the run alone, or its job if no other run is
# left.


async def sweep_expired(env: Context) -> int:
    """Removes the bodies of expired runs. Their rows stay for `row_days` and show the expiry."""
    due = await env.store.find(DueExpiries(due_by=env.now(), limit=_EXPIRED_PAGE))
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
    return None if run.expires_at is None else run.expires_at + env.config.row_days * _DAY_S


def swept(run: Run, *, sweep_at: float | None) -> Change:
    """Builds the change that schedules the next check of the run at `sweep_at`."""
    guard = Guard(equals=(("sweep_at", run.sweep_at),))
    return Change((Update(RunKey(run.job_id, run.run_id), guard, {"sweep_at": sweep_at}),))


async def remove_old_rows(env: Context) -> int:
    """Deletes runs whose results expired `row_days` ago. Returns how many."""
    due = await env.store.find(DueExpiries(due_by=env.now(), limit=_EXPIRED_PAGE))
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
    return [visible.run_id for visible in await env.store.find(query)] == [run.run_id]
