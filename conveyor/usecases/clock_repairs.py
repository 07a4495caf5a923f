"""Clock repairs: what a wall clock that was set back would leave waiting is made due
(SPEC.md 4.22).

Deadlines of running work need none of this: messages and leases go by clocks that are never set,
and a claim that ends too far ahead is not believed. What is found by its instant is looked for here
among all that is to come: after a start, and when this process sees that its clock was set.
"""

from __future__ import annotations

from contextlib import suppress

from conveyor.domain import clock_step, lifecycle, limits
from conveyor.domain.changes import Change, Guard, ScrubKey, Update
from conveyor.domain.export import progress
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import BATCH
from conveyor.domain.model import Batch, DeletionIntent, RunStatus
from conveyor.domain.queries import BatchesIn, DueExports, DueNotices, DueScrubs, RunsIn
from conveyor.domain.schedule import trigger
from conveyor.domain.schedule.cron import UnknownZone
from conveyor.domain.schedule.schedule import Schedule
from conveyor.domain.webhook import delivery
from conveyor.usecases import event_log
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context

_ROWS_MAX = 10_000
_PAGE = 500
# Further ahead than anything that is looked for here can lie, after a step of 40 days too.
_AHEAD_S = 400 * 86_400.0


async def pull_back(env: Context) -> int:
    """Makes due what waits for longer than it may; answers how much that was."""
    now = env.now()
    by = now + _AHEAD_S
    notices = await env.store.find(
        DueNotices(statuses=delivery.WAITING, due_by=by, limit=_ROWS_MAX)
    )
    exports = await env.store.find(DueExports(due_by=by, limit=_ROWS_MAX))
    scrubs = await env.store.find(DueScrubs(due_by=by, limit=_ROWS_MAX))
    changes: list[Change | None] = [
        *(delivery.pull_back(each, now=now) for each in notices),
        *(progress.pull_back(each, now=now) for each in exports),
        *(_scrub_sooner(each, now) for each in scrubs),
    ]
    due = [change for change in changes if change is not None]
    for change in due:
        await env.commit(change)  # Whoever was quicker has seen to it.
    return len(due) + await event_log.number_orphans(env.store, env.news, before=by)


def _scrub_sooner(scrub: DeletionIntent, now: float) -> Change | None:
    """Two passes lie minutes apart; what waits after them is the row of a deleted job."""
    ttl_s = limits.SECOND_DELETION_PASS_S if scrub.passes_left else limits.TOMBSTONE_TTL_S
    if not clock_step.is_unreal(scrub.due_at, now=now, ttl_s=ttl_s):
        return None
    seen = Guard(equals=(("passes_left", scrub.passes_left), ("due_at", scrub.due_at)))
    due_at = now if scrub.passes_left else now + ttl_s
    return Change((Update(ScrubKey(scrub.scrub_id), seen, {"due_at": due_at}),))


async def batches_from_ahead(env: Context) -> list[Batch]:
    """Open batches that were moved at a time to come. Whoever walks one moves it again soon."""
    statuses = lifecycle.sources(BATCH, "sealed")
    now = env.now()
    query = BatchesIn(statuses=statuses, idle_since=now + _AHEAD_S, limit=_ROWS_MAX)
    found = await env.store.find(query)
    return [each for each in found if clock_step.is_unreal(each.updated_at, now=now, ttl_s=0.0)]


async def realign_schedules(env: Context) -> int:
    """Recomputes the next time of each schedule that lies further ahead than its rule says."""
    count = 0
    last: Schedule | None = None
    while True:
        page = await schedules.due_schedules(env, by=env.now() + _AHEAD_S, after=last, limit=_PAGE)
        for last in page:
            with suppress(UnknownZone):  # Neither can it be fired, and that is told then.
                change = trigger.realign(last, now=env.now())
                if change is not None:
                    await env.commit(change)
                    count += 1
        if len(page) < _PAGE:
            return count


async def learn_newest_ids(env: Context) -> None:
    """Ids that are minted from now on sort behind those of runs and jobs that were made while the
    clock showed a later time: their rows have changed at a time to come."""
    after: RunId | None = None
    since = env.now() + limits.CLOCK_SKEW_S
    while True:
        query = RunsIn(statuses=frozenset(RunStatus), updated_since=since, after=after, limit=_PAGE)
        page = await env.store.find(query)
        for job_id in (run.job_id for run in page):
            env.minter.raise_floor(job_id)
        if len(page) < _PAGE:
            break
        after = page[-1].run_id
    for schedule in await schedules.due_schedules(
        env, by=env.now() + _AHEAD_S, after=None, limit=_ROWS_MAX
    ):
        if schedule.created_at > since:
            env.minter.raise_floor(schedule.job_id)
