"""Schedules: submit a scheduled job; replace, pause and resume its schedule; trigger it
(SPEC.md 4.17).

The schedule's row is guarded by its version, so of several schedulers one triggers.
"""

from __future__ import annotations

from enum import Enum
from functools import partial

import msgspec

from conveyor.domain import schedule_trigger
from conveyor.domain.changes import Applied, JobKey, RunKey, ScheduleKey, Stale
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import FIRST_BATCH, CallerId, JobId, RunId, fire_id
from conveyor.domain.lifecycle import JOB_VISIBLE, SCHEDULE_FIRES
from conveyor.domain.model import Job, JobType, Source
from conveyor.domain.queries import DueSchedules
from conveyor.domain.schedule import Overlap, Rule, Schedule, ScheduleStatus, next_after
from conveyor.usecases import budget
from conveyor.usecases.context import AGAIN, Again, Context, retry, retry_or_refuse
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.submit import staging, upload
from conveyor.usecases.submit.jobs import Submission, job_from, with_shards_for

_SUBJECT = "The schedule is"


class Scheduled(msgspec.Struct, frozen=True):
    """A scheduled job and its schedule, as they are now."""

    job: Job
    schedule: Schedule


class Fired(Enum):
    """The result of one nominal time."""

    STARTED = "it created a run"
    PASSED = "it created none: its run exists, or another one is live"
    WAITING = "it waits for the live run to end"
    NOT_DUE = "another worker has triggered it, or it was deferred"


async def submit(
    env: Context,
    caller: CallerId,
    request: Submission,
    rule: Rule,
    overlap: Overlap,
    *,
    job_id: JobId,
) -> Scheduled:
    """Creates the job and its schedule, or finds them. The job has no run until the schedule
    triggers."""
    if request.is_open:
        raise InvalidArgument("A scheduled job cannot be open.", pointer="/status")
    if not request.inline_count and request.input_id is None:
        raise InvalidArgument("A scheduled job needs at least one task.", pointer="/tasks")
    if request.budget is not None:
        budget.check_cap(env, request.budget)
    existing = await env.store.read(JobKey(job_id))
    if existing is not None and existing.caller == caller:
        return await _own(env, caller, job_id)
    job = msgspec.structs.replace(
        job_from(env, caller, request, job_id),
        type=JobType.SCHEDULED,
        # `job_from` builds a job with a first run. A scheduled job has none until it triggers.
        runs_count=0,
        latest_run_id=None,
        active_run_id=None,
    )
    # Before the list is staged: a rule without a next time must refuse the request with nothing
    # stored.
    first_at = _first_after(rule, job.created_at)
    source, total = await _own_list(env, job, request)
    job = with_shards_for(env, job, total)
    schedule = Schedule(
        job_id=job_id,
        status=ScheduleStatus.ACTIVE,
        rule=rule,
        overlap=overlap,
        source=source,
        total=total,
        created_at=job.created_at,
        updated_at=job.created_at,
        next_fire_at=first_at,
    )
    if isinstance(await env.commit(schedule_trigger.new_job(job, schedule)), Stale):
        return await _own(env, caller, job_id)
    return Scheduled(job, schedule)


async def _own_list(env: Context, job: Job, request: Submission) -> tuple[Source, int]:
    """Stages the list under the job instead of a run: task ids derive from the job, and no deletion
    of a run removes the list."""
    owner = RunId(job.job_id)
    if request.input_id is not None:
        return await upload.take(env, job, owner, request.input_id)
    if request.staged is not None:
        source = msgspec.structs.replace(request.staged.source, origin_run_id=owner)
        return source, request.staged.total
    specs = await staging.check_tasks(
        env, job, request.drafts, request.on_invalid, bytes_sent=request.bytes_sent
    )
    return await staging.stage(env, job.job_id, owner, FIRST_BATCH, specs), len(specs)


async def schedule_of(env: Context, job: Job) -> Schedule | None:
    if job.type is not JobType.SCHEDULED:
        return None
    return await env.store.read(ScheduleKey(job.job_id))


async def replace(
    env: Context, caller: CallerId, job_id: str, rule: Rule, overlap: Overlap
) -> Scheduled:
    """Replaces the rule from now on. A live run continues. The same rule again changes nothing."""
    attempt = partial(_try_replace, env, caller, job_id, rule, overlap)
    return await retry_or_refuse(_SUBJECT, attempt)


async def _try_replace(
    env: Context, caller: CallerId, job_id: str, rule: Rule, overlap: Overlap
) -> Scheduled | Again:
    stored = await _own(env, caller, job_id)
    change = schedule_trigger.replace(stored.schedule, rule, overlap, now=env.now())
    if change is None:
        return stored
    # Only for its refusal: a rule that never triggers is not accepted.
    _first_after(rule, env.now())
    if not isinstance(await env.commit(change), Applied):
        return AGAIN
    return await _own(env, caller, job_id)


async def set_state(
    env: Context, caller: CallerId, job_id: str, state: ScheduleStatus
) -> Scheduled:
    return await retry_or_refuse(_SUBJECT, partial(_try_set_state, env, caller, job_id, state))


async def _try_set_state(
    env: Context, caller: CallerId, job_id: str, state: ScheduleStatus
) -> Scheduled | Again:
    stored = await _own(env, caller, job_id)
    if stored.schedule.status is state:
        return stored
    flip = schedule_trigger.pause if state is ScheduleStatus.PAUSED else schedule_trigger.resume
    if not isinstance(await env.commit(flip(stored.schedule, now=env.now())), Applied):
        return AGAIN
    return await _own(env, caller, job_id)


async def due_schedules(
    env: Context, *, by: float, after: Schedule | None, limit: int
) -> list[Schedule]:
    """Returns a page of the schedules that trigger until `by`, soonest first; some may be
    overdue."""
    position = None
    if after is not None:
        assert after.next_fire_at is not None
        position = (after.next_fire_at, after.job_id)
    query = DueSchedules(statuses=SCHEDULE_FIRES, due_by=by, after=position, limit=limit)
    return await env.store.find(query)


async def trigger_schedule(env: Context, job_id: JobId) -> Fired:
    """Performs what is due for one schedule, once, however many schedulers try."""
    fired = await retry(partial(_try_fire, env, job_id))
    return Fired.NOT_DUE if isinstance(fired, Again) else fired


async def _try_fire(env: Context, job_id: JobId) -> Fired | Again:
    schedule = await env.store.read(ScheduleKey(job_id))
    job = await env.store.read(JobKey(job_id))
    if schedule is None or not schedule_trigger.is_due(schedule, now=env.now()):
        return Fired.NOT_DUE
    if job is None or job.status not in JOB_VISIBLE:
        return Fired.NOT_DUE
    assert schedule.next_fire_at is not None
    # Derived from the nominal time, so that two schedulers cannot create two runs for one time.
    run_id = fire_id(job_id, schedule.next_fire_at)
    exists = await env.store.read(RunKey(job_id, run_id)) is not None
    decided = schedule_trigger.trigger(job, schedule, run_id, exists=exists, now=env.now())
    if decided is None:
        return Fired.WAITING
    if not isinstance(await env.commit_with_events(decided.change), Applied):
        return AGAIN
    # Only the schedule's row advanced: the run exists already, or the time is skipped.
    if decided.run is None:
        return Fired.PASSED
    # After the commit: a signal for a run that does not exist would be lost.
    await env.signals.batch_opened(job_id, run_id)
    await env.signals.run_changed(job_id, run_id, decided.run.planned)
    return Fired.STARTED


async def _own(env: Context, caller: CallerId, job_id: str) -> Scheduled:
    job = await load_owned_job(env, caller, job_id)
    schedule = await schedule_of(env, job)
    if schedule is None:
        raise Conflict("The job is not a scheduled one.")
    return Scheduled(job, schedule)


def _first_after(rule: Rule, now: float) -> float:
    first_at = next_after(rule, now)
    if first_at is None:
        raise InvalidArgument("The schedule would never fire: no such time is to come.")
    return first_at
