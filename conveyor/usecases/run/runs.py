"""Runs: check for completion, stop, fail, pause, resume, delete (SPEC.md 3, 4.13).

Each operation is an optimistic retry: read the rows, decide, commit one guarded change. A stop has
two halves, the request and the end, so that any process can finish it after a crash.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import msgspec
import trio

from conveyor.domain import lifecycle
from conveyor.domain.changes import Applied, JobKey, RunKey
from conveyor.domain.errors import Conflict, NotFound
from conveyor.domain.ids import CallerId, EventId, JobId, RunId, is_ulid
from conveyor.domain.lifecycle import RUN_LIVE, RUN_VISIBLE
from conveyor.domain.model import Job, PauseState, Run, RunFailure, RunStatus, Totals
from conveyor.domain.queries import BatchesOf, RunsOf, StatsOf, sum_stats
from conveyor.domain.run import termination
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import AGAIN, Again, Context, retry, retry_or_refuse
from conveyor.usecases.lookup import latest_run, load_owned_job, load_owned_run, totals_of
from conveyor.usecases.run import run_progress

# Interval of lease counts during a stop. The caller waits for the response, so it is short; each
# count is a call to the coordinator.
_LOOK_S = 0.02


class Stopped(msgspec.Struct, frozen=True):
    """The response to a stop: the run as it ended, its counters, and what was released."""

    run: Run
    totals: Totals
    receipt: TeardownResult


async def complete_if_drained(env: Context, job_id: JobId, run_id: RunId, shard_count: int) -> None:
    """Completes the run if no task is unfinished. Of a run with several shards the counters are
    read first: most groups of settles leave tasks, and then one read suffices."""
    if shard_count > 1:
        query = StatsOf(job_id=job_id, run_id=run_id, shard_count=shard_count)
        totals = sum_stats(await env.store.find(query))
        # Every task was admitted before it could be settled, so the last settle sees all of them.
        if totals.done < totals.admitted:
            return
    await complete_if_done(env, job_id, run_id)


async def complete_if_done(env: Context, job_id: JobId, run_id: RunId) -> bool:
    """Completes the run if no task is unfinished. Of two concurrent last changes, the later one
    sees the effects of both, so completion is not missed.

    Returns whether the run has ended, by this call or before.
    """
    has_ended = await retry(partial(_try_complete, env, job_id, run_id))
    return False if isinstance(has_ended, Again) else has_ended


async def _try_complete(env: Context, job_id: JobId, run_id: RunId) -> bool | Again:
    run = await env.store.read(RunKey(job_id, run_id))
    if run is None or run.status not in RUN_LIVE:
        return True
    totals = await totals_of(env, run)
    if lifecycle.is_stopping(run) or not lifecycle.is_complete(run, totals):
        return False
    job = await env.store.read(JobKey(job_id))
    # The job was deleted meanwhile. Its deletion removes the run.
    if job is None:
        return True
    verdict = await env.commit_with_events(termination.complete(job, run, totals, now=env.now()))
    if not isinstance(verdict, Applied):
        return AGAIN
    # After the commit: a crash in between leaves a queue that the sweeper removes. The other order
    # could remove the queue of a live run.
    await env.queue.close_run(run_id)
    return True


async def ensure_queue(env: Context, job_id: JobId, run_id: RunId) -> bool:
    """Creates the queue of a live run again. Returns False if the run has ended.

    The row is read after the queue is created: deletions find queues by the rows of runs, so a
    queue created after the rows are gone would never be removed.
    """
    await env.queue.open_run(run_id)
    run = await env.store.read(RunKey(job_id, run_id))
    if run is not None and run.status in RUN_LIVE:
        return True
    await env.queue.close_run(run_id)
    return False


async def stop(
    env: Context, caller: CallerId, job_id: str, *, reason: str | None = None
) -> Stopped:
    """Ends the latest run. First the request, after which nothing settles, then the work, then the
    status."""
    job = await load_owned_job(env, caller, job_id)
    run = await latest_run(env, job)
    if run is None:
        raise Conflict("The job has no run to stop.", code="run_not_stoppable")
    if lifecycle.accepts_settles(run):
        await env.commit(termination.request_stop(run, reason=reason, now=env.now()))
    receipt = await _tear_down_workers(env, run)
    ended = await finish_stop(env, run.job_id, run.run_id)
    if ended is None:
        raise NotFound("There is no such job.")
    # The run completed or failed before the request, or every task had ended when the stop was
    # finished.
    if ended.status is not RunStatus.STOPPED:
        raise Conflict(
            f"The latest run is {ended.status} and cannot be stopped; start a new one with /rerun.",
            code="run_not_stoppable",
        )
    return Stopped(ended, await totals_of(env, ended), receipt)


async def _tear_down_workers(env: Context, run: Run) -> TeardownResult:
    """Ends the work on a run: in this process at once, in other processes as soon as they notice
    the request."""
    deadline_s, began_at = env.config.teardown_s, trio.current_time()
    receipt = TeardownResult()
    # An outage of the coordinator must not prevent the stop: then the receipt is not complete.
    with trio.move_on_after(deadline_s), suppress(Unavailable):
        receipt = await env.signals.teardown(run.job_id, run.run_id, deadline_s=deadline_s)
        await _wait_no_leases(env, run)
        # A worker without a connection to the coordinator holds leases that are not counted. Wait
        # until it must have noticed the stop.
        await trio.sleep_until(began_at + env.config.unseen_s)
        return await _with_abandoned(env, run, receipt)
    return await _with_abandoned(env, run, msgspec.structs.replace(receipt, complete=False))


async def _with_abandoned(env: Context, run: Run, receipt: TeardownResult) -> TeardownResult:
    """Adds the calls that a remote gateway continues: those that pollers interrupted, and those of
    pollers that have not ended yet, which hold leases."""
    if env.config.targets is not None:
        return receipt
    try:
        count = await run_progress.count_abandoned(env, run.run_id)
        # After a complete teardown no poller of the run holds a lease.
        if not receipt.complete:
            count += await env.coordinator.count(run.run_id)
    except Unavailable:
        return receipt
    return msgspec.structs.replace(receipt, abandoned=count)


async def count_leases(env: Context, run: Run) -> int | None:
    """Counts the leases that work on the run holds; None while they cannot be counted."""
    try:
        return await env.coordinator.count(run.run_id)
    except Unavailable:
        return None


async def _wait_no_leases(env: Context, run: Run) -> None:
    """Waits until no process holds a lease of the run. Leases are the only state that all processes
    share about running work."""
    is_held = True
    while is_held:
        is_held = await env.coordinator.count(run.run_id) > 0
        await trio.sleep(_LOOK_S if is_held else 0)


async def finish_stop(env: Context, job_id: JobId, run_id: RunId) -> Run | None:
    """Performs the second half of a stop. The caller's request, discovery and the sweeper all call
    it; one of them applies the change."""
    return await retry_or_refuse("The run is", partial(_try_finish_stop, env, job_id, run_id))


async def _try_finish_stop(env: Context, job_id: JobId, run_id: RunId) -> Run | Again | None:
    run = await env.store.read(RunKey(job_id, run_id))
    if run is None or not lifecycle.is_stopping(run):
        return run
    job = await env.store.read(JobKey(job_id))
    if job is None:
        return run
    totals = await totals_of(env, run)
    verdict = await env.commit_with_events(termination.finish_stop(job, run, totals, now=env.now()))
    if isinstance(verdict, Applied):
        await env.queue.close_run(run_id)
    # Return the row as it ended, by this call or another: the next attempt reads it.
    return AGAIN


async def fail(env: Context, run: Run, cause: RunFailure, detail: str) -> None:
    """Performs the first half of failing a run. Discovery ends its work and finishes."""
    await env.commit(termination.request_failure(run, cause, detail, now=env.now()))
    await env.signals.run_changed(run.job_id, run.run_id)


async def set_pause(env: Context, caller: CallerId, job_id: str, state: PauseState) -> Run:
    """Pauses or resumes the latest run. Tasks in flight may still settle."""
    job = await load_owned_job(env, caller, job_id)
    return await retry_or_refuse("The run is", partial(_try_set_pause, env, job, state))


async def _try_set_pause(env: Context, job: Job, state: PauseState) -> Run | Again:
    run = await latest_run(env, job)
    if run is None:
        raise Conflict("The job has no run to pause or resume.", code="run_not_pausable")
    if run.status not in RUN_LIVE:
        raise Conflict(
            f"The latest run is {run.status}: only a live run can be paused or resumed.",
            code="run_not_pausable",
        )
    # Signal also if nothing changed here: the previous attempt of this loop may have set the state.
    if run.pause_state is state:
        await env.signals.run_changed(run.job_id, run.run_id)
        return run
    await env.commit_with_events(
        termination.set_pause(run, state, EventId(env.new_id()), now=env.now())
    )
    # Return the row as it is now, set by this call or another: the next attempt reads it.
    return AGAIN


async def delete_run(env: Context, caller: CallerId, job_id: str, run_id: str) -> None:
    """Hides one run at once; its rows and bodies are removed in the background.

    A repeated request succeeds for as long as the run's row exists.
    """
    await retry_or_refuse("The job is", partial(_try_delete_run, env, caller, job_id, run_id))


async def _try_delete_run(env: Context, caller: CallerId, job_id: str, run_id: str) -> Again | None:
    job = await load_owned_job(env, caller, job_id)
    if await _is_deleted(env, job, run_id):
        return None
    run = await load_owned_run(env, job, run_id)
    others = await _other_runs(env, job, run)
    await _refuse_if_needed(env, run, others)
    change = termination.delete_run(
        job,
        run,
        next_latest=others[0].run_id if others else None,
        intent_id=env.new_id(),
        now=env.now(),
    )
    if not isinstance(await env.commit_with_events(change), Applied):
        return AGAIN
    # After the commit: a refused deletion must not stop the work.
    await env.signals.teardown(job.job_id, run.run_id, deadline_s=env.config.teardown_s)
    await env.queue.close_run(run.run_id)
    return None


async def _is_deleted(env: Context, job: Job, run_id: str) -> bool:
    run = await env.store.read(RunKey(job.job_id, RunId(run_id))) if is_ulid(run_id) else None
    return run is not None and run.status not in RUN_VISIBLE


async def _other_runs(env: Context, job: Job, run: Run) -> list[Run]:
    """Returns all other visible runs, newest first."""
    # All runs in one query: each one may have inherited results of the deleted run.
    query = RunsOf(job_id=job.job_id, statuses=RUN_VISIBLE, limit=10_000)
    return [other for other in await env.store.find(query) if other.run_id != run.run_id]


async def _refuse_if_needed(env: Context, run: Run, others: list[Run]) -> None:
    for other in others:
        # The bodies of inherited results belong to the run that fetched them and are deleted with
        # it.
        if run.run_id in other.source_run_ids or await _reads_from(env, other, run):
            raise Conflict(
                f"Run {other.run_id} still has tasks whose results belong to this run.",
                code="run_has_descendants",
            )


async def _reads_from(env: Context, other: Run, run: Run) -> bool:
    """Returns whether a rerun is still being ingested from the rows of the run."""
    if other.rerun_of != run.run_id or other.open_batches == 0:
        return False
    batches = await env.store.find(BatchesOf(job_id=other.job_id, run_id=other.run_id))
    return any(batch.source is not None for batch in batches)
