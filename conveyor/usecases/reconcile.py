"""Reconcile: finds what a crash left half done and finishes it by the ordinary paths (SPEC 6.9).

Everything here is small, paginated, conditional on what it read, and safe to repeat.
"""

from __future__ import annotations

from contextlib import aclosing, suppress

import msgspec

from conveyor.domain import ingestion, lifecycle, limits
from conveyor.domain.changes import Change, Delete, Guard, JobKey, ScrubKey, Update
from conveyor.domain.errors import Conflict
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import BATCH, RUN_LIVE, RUN_TERMINAL, TASK_UNFINISHED
from conveyor.domain.model import Batch, Run, RunStatus, Scrub, TaskRef
from conveyor.domain.queries import BatchesIn, DueScrubs, RunsIn, RunsOf
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.usecases import feeds, ingest, inputs, runs, staging
from conveyor.usecases.env import Env
from conveyor.usecases.ingest import Ingested
from conveyor.usecases.walking import pages_of

_PAGE = 200
_SCRUB_ROWS = 2_000
_ENDED_LOOKBACK_S = 3600.0
_UNPLACED_S = 2.0


class Repairs(msgspec.Struct):
    """What one sweep did."""

    completed: int = 0
    stopped: int = 0
    resent: int = 0
    scrubbed: int = 0


async def stalled_batches(env: Env, *, idle_s: float) -> list[Batch]:
    """Open batches that nobody has moved for a while."""
    statuses = lifecycle.sources(BATCH, "sealed")
    query = BatchesIn(statuses=statuses, idle_since=env.now() - idle_s, limit=_PAGE)
    return await env.store.find(query)


async def finish_batch(env: Env, batch: Batch) -> Ingested:
    """Takes a batch up where it stands; ends the intent if its run is over."""
    taken = await ingest.take_over(env, batch)
    if taken is None:
        return Ingested.FENCED
    try:
        return await ingest.walk(env, taken)
    except Unavailable:
        await env.commit(ingestion.forgive(taken))
        raise


async def sweep_runs(env: Env) -> Repairs:
    """Looks at every live run once: missed completions, half stops, lost messages."""
    repairs = Repairs()
    after: RunId | None = None
    while True:
        page = await env.store.find(RunsIn(statuses=RUN_LIVE, after=after, limit=_PAGE))
        for run in page:
            await _repair(env, run, repairs)
        if len(page) < _PAGE:
            return repairs
        after = page[-1].run_id


async def close_ended_queues(env: Env) -> None:
    """A crash may fall between a run's end and the removal of its queue."""
    since = env.now() - _ENDED_LOOKBACK_S
    after: RunId | None = None
    while True:
        query = RunsIn(statuses=RUN_TERMINAL, updated_since=since, after=after, limit=_PAGE)
        page = await env.store.find(query)
        for run in page:
            await env.queue.close_run(run.run_id)
        if len(page) < _PAGE:
            return
        after = page[-1].run_id


async def _repair(env: Env, run: Run, repairs: Repairs) -> None:
    if run.stop_requested_at is not None:
        await env.signals.teardown(run.job_id, run.run_id, deadline_s=env.policy.teardown_s)
        with suppress(Conflict):  # Whoever keeps changing it is done when we come again.
            await runs.finish_stop(env, run.job_id, run.run_id)
            repairs.stopped += 1
    elif await runs.look(env, run.job_id, run.run_id):
        repairs.completed += 1
    else:
        repairs.resent += await _resend(env, run)


async def _resend(env: Env, run: Run) -> int:
    """Sends refs again when a run has unfinished tasks but not one message.

    Only then: a queue that is merely slow must not be flooded. A task that somebody has in hand
    has a message, so the queue of a run at work is never empty. And not while a list is on its way
    in: its rows may be there before they count, and nothing may end that was not admitted. Whoever
    ends the run meanwhile removes its queue: then there is nobody left to send to.
    """
    depth = await env.queue.depth(run.run_id)
    if depth.visible or depth.hidden:
        return 0
    await env.queue.open_run(run.run_id)
    sent = 0
    async with aclosing(pages_of(env, run, statuses=TASK_UNFINISHED)) as pages:
        async for page in pages:
            if await ingest.open_batches_of(env, run.job_id, run.run_id):
                break
            refs = [TaskRef(run.job_id, run.run_id, row.task_id, row.shard) for row in page]
            try:
                await env.queue.send(refs)
            except QueueGone:
                break
            sent += len(refs)
    return sent


async def place_events(env: Env) -> int:
    """Events whose writer did not come to giving them their places."""
    return await feeds.place_left(env.store, env.news, before=env.now() - _UNPLACED_S)


async def scrub_due(env: Env) -> int:
    """Removes what is left of deleted jobs and runs; each is done twice, some time apart."""
    done = 0
    for scrub in await env.store.find(DueScrubs(due_by=env.now(), limit=_PAGE)):
        await _scrub(env, scrub)
        done += 1
    await inputs.remove_expired(env)
    await env.store.purge(env.now())
    return done


async def _scrub(env: Env, scrub: Scrub) -> None:
    prefix = f"jobs/{scrub.job_id}"
    if scrub.run_id is None:
        await _close_queues(env, scrub)
    else:
        prefix = f"{prefix}/runs/{scrub.run_id}"
        await env.queue.close_run(scrub.run_id)
        await env.blobs.delete_prefix(f"jobs/{scrub.job_id}/sources/{scrub.run_id}")
        await env.blobs.delete_prefix(f"jobs/{scrub.job_id}/exports/{scrub.run_id}")
        await env.blobs.delete_prefix(staging.sources_prefix(scrub.job_id, scrub.run_id))
    await env.blobs.delete_prefix(prefix)
    while await env.store.scrub(scrub.job_id, scrub.run_id, limit=_SCRUB_ROWS):
        pass
    await env.commit(_scrubbed(env, scrub))


async def _close_queues(env: Env, scrub: Scrub) -> None:
    """While the rows of the job's runs still tell which queues it had."""
    before: int | None = None
    while True:
        query = RunsOf(
            job_id=scrub.job_id, statuses=frozenset(RunStatus), before=before, limit=_PAGE
        )
        page = await env.store.find(query)
        for run in page:
            await env.queue.close_run(run.run_id)
        if len(page) < _PAGE:
            return
        before = page[-1].sequence


def _scrubbed(env: Env, scrub: Scrub) -> Change:
    key = ScrubKey(scrub.scrub_id)
    seen = Guard(equals=(("passes_left", scrub.passes_left),))
    if scrub.passes_left > 1:
        values = {"due_at": env.now() + limits.SECOND_SCRUB_S}
        return Change((Update(key, seen, values, {"passes_left": -1}),))
    if scrub.run_id is None and scrub.passes_left == 1:
        values = {"due_at": env.now() + limits.TOMBSTONE_TTL_S}
        return Change((Update(key, seen, values, {"passes_left": -1}),))
    tombstone = (Delete(JobKey(scrub.job_id)),) if scrub.run_id is None else ()
    return Change((Delete(key, seen), *tombstone))
