"""Events: the types of events in a caller's event log, and its rows (SPEC.md 4.15)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.ids import CallerId, EventId, JobId, RunId


class EventType(StrEnum):
    JOB_CREATED = "job.created"  #: A job was submitted.
    JOB_CLOSED = "job.closed"  #: An open job takes no further list.
    JOB_DELETED = "job.deleted"  #: A job was deleted.
    RUN_CREATED = "run.created"  #: A run was created by a submit, a rerun or a schedule.
    RUN_PAUSED = "run.paused"  #: A run was paused.
    RUN_RESUMED = "run.resumed"  #: A paused run was resumed.
    RUN_COMPLETED = "run.completed"  #: A run ended with every task ended.
    RUN_STOPPED = "run.stopped"  #: A run was stopped before every task ended.
    RUN_FAILED = "run.failed"  #: A run ended because of an account-level error.
    RUN_DELETED = "run.deleted"  #: A run was deleted.
    INGEST_DONE = "ingest.done"  #: A list that was ingested after the response is complete.


class Event(msgspec.Struct, frozen=True):
    """An event of a job, written in the same transaction as the change that it reports.

    `seq` is its position in the caller's event log, 0 until it is assigned. The event is removed
    with the job and the run whose ids it has.
    """

    caller: CallerId  #: The caller whose event log it belongs to.
    event_id: EventId  #: Hash of what happened; random for what may happen repeatedly.
    event_type: EventType  #: What happened.
    occurred_at: float  #: When it happened.
    expires_at: float  #: When the event is removed.
    data: str  #: The event's content, as JSON.
    job_id: JobId | None = None  #: The job that the event is deleted with.
    run_id: RunId | None = None  #: The run that the event is deleted with.
    seq: int = 0  #: Sequence number in the caller's event log; 0 until it is assigned.


class EventSequence(msgspec.Struct, frozen=True):
    """The number of events that a caller's log has ever had."""

    caller: CallerId  #: The caller whose event log is numbered.
    seq: int  #: The sequence number that was assigned last.
