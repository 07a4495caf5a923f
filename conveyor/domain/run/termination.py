"""The ends of runs and jobs: complete, stop, fail, delete, each one guarded change (SPEC.md 3).

A stop has two steps. The first closes the counters to settles, so that the totals are final. The
second reads these totals and decides between completed, stopped and failed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain import event_log, lifecycle
from conveyor.domain.changes import (
    Change,
    Delete,
    Guard,
    Insert,
    JobKey,
    NoticeKey,
    RunKey,
    ScheduleKey,
    ScrubKey,
    StatsKey,
    Update,
    Write,
)
from conveyor.domain.ids import EventId, RunId, notice_id
from conveyor.domain.lifecycle import (
    ACCEPTS_SETTLES,
    COUNTERS,
    JOB,
    RUN,
    RUN_LIVE,
    RUN_TERMINAL,
    CounterEvent,
    JobEvent,
    RunEvent,
)
from conveyor.domain.model import (
    DeletionIntent,
    EventType,
    Job,
    JobType,
    Notice,
    NoticeChannel,
    NoticeStatus,
    PauseState,
    Run,
    RunFailure,
    Totals,
)
from conveyor.domain.webhook import run_facts, run_payload, task_summary

_EVENT_OF = {
    RunEvent.COMPLETED: EventType.RUN_COMPLETED,
    RunEvent.FAILED: EventType.RUN_FAILED,
    RunEvent.STOPPED: EventType.RUN_STOPPED,
}
INGEST_FAILED = "ingest_failed"


def complete(job: Job, run: Run, totals: Totals, *, now: float) -> Change:
    """Completes a run whose tasks are all terminal. The notice is part of the same change, so that
    no end without a notice can be stored.
    """
    return _end(job, run, totals, RunEvent.COMPLETED, {}, now)


def request_stop(run: Run, *, reason: str | None, now: float, detail: str | None = None) -> Change:
    """First step of a stop. No task settles after it, and the stored request survives a crash."""
    values = {
        "stop_requested_at": now,
        "stop_reason": reason,
        "failure_detail": detail,
        "updated_at": now,
    }
    return Change((Update(_key(run), ACCEPTS_SETTLES, values), *_drain_counters(run)))


def request_failure(run: Run, cause: RunFailure, detail: str, *, now: float) -> Change:
    """First step of failing a run because of an account-level error."""
    values = {
        "stop_requested_at": now,
        "failure_reason": cause,
        "failure_detail": detail[:500],
        "updated_at": now,
    }
    return Change((Update(_key(run), ACCEPTS_SETTLES, values), *_drain_counters(run)))


def finish_stop(job: Job, run: Run, totals: Totals, *, now: float) -> Change:
    """Second step: the frozen counters decide. If every task had ended, the run is completed."""
    if lifecycle.is_complete(run, totals):
        no_cause = {"failure_reason": None, "failure_detail": None, "stop_reason": None}
        return _end(job, run, totals, RunEvent.COMPLETED, no_cause, now)
    event = RunEvent.FAILED if run.failure_reason else RunEvent.STOPPED
    return _end(job, run, totals, event, {}, now)


def set_pause(run: Run, state: PauseState, identity: EventId, *, now: float) -> Change:
    """Pauses or resumes a live run. It can happen many times, so the caller gives the event id."""
    values = {"pause_state": state, "updated_at": now}
    kind = EventType.RUN_PAUSED if state is PauseState.PAUSED else EventType.RUN_RESUMED
    return Change(
        (
            Update(_key(run), Guard(RUN_LIVE, (("pause_state", run.pause_state),)), values),
            event_log.of_run(run, kind, now=now, identity=identity),
        )
    )


def delete_run(
    job: Job, run: Run, *, next_latest: RunId | None, intent_id: str, now: float
) -> Change:
    """Hides the run immediately. A deletion in the background removes its rows and bodies."""
    values: dict[str, Any] = {"updated_at": now}
    events: list[Insert] = []
    if job.latest_run_id == run.run_id:
        values["latest_run_id"] = next_latest
    if job.active_run_id == run.run_id:
        values["active_run_id"] = None
        values |= {"status": lifecycle.target(JOB, JobEvent.CLOSED)}
        events = event_log.closed_event(job, now=now)
    guard = Guard(
        status_in=lifecycle.sources(JOB, JobEvent.DELETED) & {job.status},
        equals=(("latest_run_id", job.latest_run_id), ("active_run_id", job.active_run_id)),
    )
    return Change(
        (
            Update(
                _key(run),
                Guard(status_in=lifecycle.sources(RUN, RunEvent.DELETED)),
                _deletion_values(now),
            ),
            Update(JobKey(job.job_id), guard, values),
            *(_close_counters(run) if run.status in RUN_LIVE else ()),
            _insert_intent(job, run.run_id, intent_id, now),
            event_log.of_run(run, EventType.RUN_DELETED, now=now),
            *events,
        )
    )


def delete_job(job: Job, active: Run | None, *, intent_id: str, now: float) -> Change:
    """Makes the job a tombstone without customer data. A deletion in the background removes the
    rest.
    """
    tombstone: dict[str, Any] = {
        "status": lifecycle.target(JOB, JobEvent.DELETED),
        "updated_at": now,
        "params": {},
        "headers_sealed": None,
        "auth_sealed": None,
        "external_id": None,
        "name": None,
        "metadata": None,
        "webhook": None,
        "active_run_id": None,
        "budget": None,
        "host_limits": None,
        "task_token_sealed": None,
    }
    guard = Guard(
        status_in=lifecycle.sources(JOB, JobEvent.DELETED),
        equals=(("active_run_id", job.active_run_id),),
    )
    writes: list[Write] = [Update(JobKey(job.job_id), guard, tombstone)]
    if active is not None:
        live = Guard(status_in=RUN_LIVE)
        writes += [Update(_key(active), live, _deletion_values(now)), *_close_counters(active)]
    if job.type is JobType.SCHEDULED:
        writes.append(Delete(ScheduleKey(job.job_id)))
    deleted = event_log.job_deleted(job, now=now)
    return Change((*writes, _insert_intent(job, None, intent_id, now), deleted))


def close(job: Job, run: Run, *, now: float) -> Change:
    """Closes an open job: it accepts no more tasks."""
    closed = {"status": lifecycle.target(JOB, JobEvent.CLOSED), "updated_at": now}
    return Change(
        (
            Update(
                JobKey(job.job_id), Guard(status_in=lifecycle.sources(JOB, JobEvent.CLOSED)), closed
            ),
            Update(
                _key(run),
                Guard(status_in=RUN_LIVE),
                {"last_batch_received": True, "updated_at": now},
            ),
            *event_log.closed_event(job, now=now),
        )
    )


def close_ended(job: Job, *, now: float) -> Change:
    """Closes an open job whose run was already stopped or has failed."""
    closed = {"status": lifecycle.target(JOB, JobEvent.CLOSED), "updated_at": now}
    guard = Guard(
        status_in=lifecycle.sources(JOB, JobEvent.CLOSED), equals=(("active_run_id", None),)
    )
    return Change(
        (Update(JobKey(job.job_id), guard, closed), *event_log.closed_event(job, now=now))
    )


def note_queue_closed(run: Run) -> Change:
    """Records that the queue of the run is removed, so that the sweeper does not remove it again.

    `updated_at` stays the same, because nothing has changed for readers of the run.
    """
    ended = Guard(status_in=RUN_TERMINAL)
    return Change((Update(_key(run), ended, {"queue_closed": True}),))


def _key(run: Run) -> RunKey:
    return RunKey(run.job_id, run.run_id)


def _deletion_values(now: float) -> dict[str, Any]:
    return {"status": lifecycle.target(RUN, RunEvent.DELETED), "updated_at": now, "ended_at": now}


def _drain_counters(run: Run) -> tuple[Update, ...]:
    """Makes the counters refuse settles but accept releases."""
    return _change_counters(run, CounterEvent.DRAINING)


def _close_counters(run: Run) -> tuple[Update, ...]:
    return _change_counters(run, CounterEvent.CLOSED)


def _change_counters(run: Run, event: CounterEvent) -> tuple[Update, ...]:
    guard = Guard(status_in=lifecycle.sources(COUNTERS, event))
    values = {"status": lifecycle.target(COUNTERS, event)}
    return tuple(
        Update(StatsKey(run.job_id, run.run_id, shard), guard, values)
        for shard in range(run.shard_count)
    )


def _insert_intent(job: Job, run_id: RunId | None, intent_id: str, now: float) -> Insert:
    intent = DeletionIntent(
        job_id=job.job_id,
        run_id=run_id,
        scrub_id=intent_id,
        shard_count=job.shard_count,
        due_at=now,
        passes_left=2,
    )
    return Insert(ScrubKey(intent_id), intent)


def _end(
    job: Job, run: Run, totals: Totals, event: RunEvent, values: dict[str, Any], now: float
) -> Change:
    expires_at = now + job.result_ttl_days * 86_400.0
    ended = {
        "status": lifecycle.target(RUN, event),
        "updated_at": now,
        "ended_at": now,
        "expires_at": expires_at,
        "sweep_at": expires_at,
        **values,
    }
    freed = {"active_run_id": None, "updated_at": now}
    owned = Guard(equals=(("active_run_id", run.run_id),))
    writes: list[Write] = [
        Update(_key(run), Guard(status_in=lifecycle.sources(RUN, event)), ended),
        Update(JobKey(job.job_id), owned, freed),
        *_close_counters(run),
    ]
    final = msgspec.structs.replace(run, **values)
    facts = run_facts(final, totals)
    writes.append(event_log.of_run(final, _EVENT_OF[event], now=now, **facts))
    if job.webhook is not None:
        payload = run_payload(job, final, totals, _EVENT_OF[event], now)
        writes.append(_notice(run, NoticeChannel.WEBHOOK, _EVENT_OF[event], payload, now))
    if (
        job.task_token_sealed is not None and run.sequence == 1
    ):  # A token can be completed only once.
        payload = task_summary(final, totals, lifecycle.target(RUN, event))
        writes.append(_notice(run, NoticeChannel.STEP_FUNCTIONS, _EVENT_OF[event], payload, now))
    return Change(tuple(writes))


def _notice(run: Run, channel: NoticeChannel, event_type: str, payload: str, now: float) -> Insert:
    is_webhook = channel is NoticeChannel.WEBHOOK
    identity = notice_id(run.run_id, event_type if is_webhook else f"{event_type}:{channel}")
    notice = Notice(
        notice_id=identity,
        job_id=run.job_id,
        run_id=run.run_id,
        event_type=event_type,
        status=NoticeStatus.DUE,
        occurred_at=now,
        due_at=now,
        due_since=now,
        payload=payload,
        channel=channel,
    )
    return Insert(NoticeKey(identity), notice)
