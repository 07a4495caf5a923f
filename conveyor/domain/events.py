"""Events: what a caller's feed tells of, and the rows it is kept in (SPEC 6.10)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.ids import CallerId, EventId, JobId, RunId


class EventType(StrEnum):
    JOB_CREATED = "job.created"
    JOB_CLOSED = "job.closed"
    JOB_DELETED = "job.deleted"
    RUN_CREATED = "run.created"
    RUN_PAUSED = "run.paused"
    RUN_RESUMED = "run.resumed"
    RUN_COMPLETED = "run.completed"
    RUN_STOPPED = "run.stopped"
    RUN_FAILED = "run.failed"
    RUN_DELETED = "run.deleted"
    INGEST_DONE = "ingest.done"


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a job, written with the change that it tells of.

    `seq` is its place in the caller's feed, 0 until it has one. It is removed with the job and
    run whose ids it has.
    """

    caller: CallerId
    event_id: EventId
    event_type: EventType
    occurred_at: float
    expires_at: float
    data: str
    job_id: JobId | None = None
    run_id: RunId | None = None
    seq: int = 0


class Feed(msgspec.Struct, frozen=True):
    """How many events a caller was ever told of."""

    caller: CallerId
    seq: int
