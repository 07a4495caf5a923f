"""Clock repairs: makes rows due that a wall clock which was set back would leave waiting
(SPEC.md 4.22).

Deadlines of running work need no repair: messages and leases use clocks that are never set, and a
claim that ends too far ahead counts as lapsed. Rows that are found by an instant are searched here
among all future ones (`RepairTrigger`).
"""

from __future__ import annotations

from contextlib import suppress

from conveyor.domain import limits, schedule_trigger, timing
from conveyor.domain import webhook as webhooks
from conveyor.domain.changes import Change, Guard, ScrubKey, Update
from conveyor.domain.export import progress
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import BATCH_UNFINISHED
from conveyor.domain.model import Batch, DeletionIntent, RunStatus
from conveyor.domain.queries import BatchesIn, DueExports, DueNotices, DueScrubs, RunsIn
from conveyor.domain.schedule import Schedule, UnknownZone
from conveyor.ports.clock import Clock
from conveyor.usecases import event_log
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context

# How often a worker whose own clock is right searches: the clock of another machine may be ahead,
# and a process without a worker, such as an API, repairs nothing. A search reads all waiting rows.
REPAIR_S = 600.0
# Bounds the rows of one repair. Rows beyond it are repaired by a later one.
_ROWS_MAX = 10_000
_PAGE = 500
# Further ahead than any row that is searched here can lie, even after a clock step of 40 days.
_AHEAD_S = 400 * 86_400.0


async def pull_back(env: Context) -> int:
    """Makes rows due that wait for longer than they may. Returns how many."""
    now = env.now()
    by = now + _AHEAD_S
    notices = await env.store.find(
        DueNotices(statuses=webhooks.WAITING, due_by=by, limit=_ROWS_MAX)
    )
    exports = await env.store.find(DueExports(due_by=by, limit=_ROWS_MAX))
    intents = await env.store.find(DueScrubs(due_by=by, limit=_ROWS_MAX))
    changes: list[Change | None] = [
        *(webhooks.pull_back(notice, now=now) for notice in notices),
        *(progress.pull_back(export, now=now) for export in exports),
        *(_delete_sooner(intent, now) for intent in intents),
    ]
    due = [change for change in changes if change is not None]
    for change in due:
        # The verdict is not needed: if the guard fails, another process has changed the row.
        await env.commit(change)
    return len(due) + await event_log.number_orphans(env.store, env.news, before=by)


def _delete_sooner(intent: DeletionIntent, now: float) -> Change | None:
    """Returns the change for a deletion that is due too far ahead. The first two passes are
    minutes apart; the last one waits for TOMBSTONE_TTL_S."""
    ttl_s = limits.SECOND_DELETION_PASS_S if intent.passes_left else limits.TOMBSTONE_TTL_S
    if not timing.is_unreal(intent.due_at, now=now, ttl_s=ttl_s):
        return None
    seen = Guard(equals=(("passes_left", intent.passes_left), ("due_at", intent.due_at)))
    due_at = now if intent.passes_left else now + ttl_s
    return Change((Update(ScrubKey(intent.scrub_id), seen, {"due_at": due_at}),))


async def batches_from_ahead(env: Context) -> list[Batch]:
    """Returns open batches that were last moved at a future time. An ingester that is alive moves
    its batch again soon, so acquiring it costs little."""
    statuses = BATCH_UNFINISHED
    now = env.now()
    query = BatchesIn(statuses=statuses, idle_since=now + _AHEAD_S, limit=_ROWS_MAX)
    batches = await env.store.find(query)
    return [batch for batch in batches if timing.is_unreal(batch.updated_at, now=now, ttl_s=0.0)]


async def realign_schedules(env: Context) -> int:
    """Computes the next time again for each schedule whose time lies further ahead than its rule
    states."""
    count = 0
    last: Schedule | None = None
    while True:
        page = await schedules.due_schedules(env, by=env.now() + _AHEAD_S, after=last, limit=_PAGE)
        for last in page:
            # Such a schedule cannot trigger either, and the scheduler logs that.
            with suppress(UnknownZone):
                change = schedule_trigger.realign(last, now=env.now())
                if change is not None:
                    await env.commit(change)
                    count += 1
        if len(page) < _PAGE:
            return count


async def learn_newest_ids(env: Context) -> None:
    """Raises the floor of the id minter, so that new ids sort after the ids of runs and jobs that
    were created while the clock was ahead. Such rows have a future `updated_at`."""
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


class RepairTrigger:
    """Decides when rows with future times are searched: after a start, when the wall clock of this
    machine was set back, and every `REPAIR_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = clock.now() - clock.steady()
        self._due_at = clock.steady()

    def is_due(self) -> bool:
        """Returns whether a repair is due since the last call. Ordinary drift is not a step."""
        before, self._offset_s = self._offset_s, self._clock.now() - self._clock.steady()
        # Smaller steps are within the difference that all deadlines tolerate.
        was_set_back = before - self._offset_s > limits.CLOCK_SKEW_S
        if not was_set_back and self._clock.steady() < self._due_at:
            return False
        self._due_at = self._clock.steady() + REPAIR_S
        return True
