"""The event log: events are written with their change, then numbered (SPEC.md 4.15).

One guarded change of the caller's EventSequence row assigns each number. Readers use only these
numbers, so an event that any process commits late comes after all events that were already read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain import lifecycle, limits
from conveyor.domain.changes import Change, Delete, EventKey, FeedKey, Guard, Insert, Update, Write
from conveyor.domain.ids import CallerId, EventId, event_id
from conveyor.domain.lifecycle import JobEvent
from conveyor.domain.model import Event, EventSequence, EventType, Job, Run


def of_job(job: Job, kind: EventType, *, now: float, **facts: Any) -> Insert:
    """Returns an event that happens to a job at most once."""
    data = {"job_id": job.job_id, "external_id": job.external_id, **facts}
    event = _event(job.caller, kind, event_id(job.job_id, kind), data, now)
    return _insert(msgspec.structs.replace(event, job_id=job.job_id))


def closed_event(job: Job, *, now: float) -> list[Insert]:
    """Returns the event for closing a job; none if the job was already closed."""
    is_open = job.status in lifecycle.sources(lifecycle.JOB, JobEvent.CLOSED)
    return [of_job(job, EventType.JOB_CLOSED, now=now)] if is_open else []


def job_deleted(job: Job, *, now: float) -> Insert:
    """Returns an event with the job id only, so that it may outlive the data of the job."""
    kind = EventType.JOB_DELETED
    identity = event_id(job.job_id, kind)
    return _insert(_event(job.caller, kind, identity, {"job_id": job.job_id}, now))


def of_run(
    run: Run, kind: EventType, *, now: float, identity: EventId | None = None, **facts: Any
) -> Insert:
    """Returns an event of a run. An event that can happen again needs an `identity`."""
    data = {
        "job_id": run.job_id,
        "run_id": run.run_id,
        "run_sequence": run.sequence,
        **facts,
    }
    event = _event(run.caller, kind, identity or event_id(run.run_id, kind), data, now)
    # The event of a deleted run must outlive the run, but not the job.
    run_id = None if kind is EventType.RUN_DELETED else run.run_id
    return _insert(msgspec.structs.replace(event, job_id=run.job_id, run_id=run_id))


def assign_sequence(feed: EventSequence | None, events: Sequence[Event]) -> Change:
    """Assigns the next numbers of a caller's log to events, once."""
    assert events
    caller, seq = events[0].caller, feed.seq if feed else 0
    placed = [
        Update(
            EventKey(caller, event.event_id),
            Guard(equals=(("seq", 0),)),
            {"seq": number},
            is_quiet=True,
        )
        for number, event in enumerate(events, start=seq + 1)
    ]
    moved: Write
    if feed is None:
        moved = Insert(FeedKey(caller), EventSequence(caller, len(events)))
    else:
        moved = Update(FeedKey(caller), Guard(equals=(("seq", seq),)), {}, {"seq": len(events)})
    return Change((moved, *placed))


def trim(oldest: Sequence[Event], newest_seq: int) -> list[Change]:
    """Removes the oldest events above the limit."""
    return [
        Change((Delete(EventKey(event.caller, event.event_id)),))
        for event in oldest
        if event.seq <= newest_seq - limits.EVENTS_KEPT_MAX
    ]


def events_in(change: Change) -> list[Event]:
    """Returns the events that a change writes."""
    return [
        write.row
        for write in change.writes
        if isinstance(write, Insert) and isinstance(write.row, Event)
    ]


def _event(
    caller: CallerId, kind: EventType, identity: EventId, data: dict[str, Any], now: float
) -> Event:
    present = {name: value for name, value in data.items() if value is not None}
    return Event(
        caller=caller,
        event_id=identity,
        event_type=kind,
        occurred_at=now,
        expires_at=now + limits.EVENT_TTL_S,
        data=msgspec.json.encode(present).decode(),
    )


def _insert(event: Event) -> Insert:
    return Insert(EventKey(event.caller, event.event_id), event)
