"""The values that Conveyor keeps: Job, Run, Batch, Task, Stats and their companions (SPEC 2, 5).

Rows are frozen msgspec structs: building one costs about a tenth of a frozen dataclass, and the
settle path builds several per task. Instants are epoch seconds; money is millionths.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain import limits
from conveyor.domain.budget import BudgetCap
from conveyor.domain.hooks import Try
from conveyor.domain.hosts import HostLimits
from conveyor.domain.ids import BatchId, CallerId, JobId, NoticeId, RunId, TaskId
from conveyor.domain.inputs import UploadedList


class JobType(StrEnum):
    REGULAR = "regular"
    SCHEDULED = "scheduled"


class JobStatus(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    DELETED = "deleted"


class RunStatus(StrEnum):
    RUNNING = "running"
    PENDING = "pending"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    DELETED = "deleted"


class TaskStatus(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    SUCCESSFUL = "successful"
    FAILED = "failed"


class BatchStatus(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    ABANDONED = "abandoned"


class GateStatus(StrEnum):
    """Whether a run's counters still take changes: all, hand-backs only, or none."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class NoticeStatus(StrEnum):
    DUE = "due"
    DELIVERED = "delivered"
    EXHAUSTED = "exhausted"
    DROPPED = "dropped"


class NoticeChannel(StrEnum):
    """By which way a notice goes."""

    WEBHOOK = "webhook"
    STEP_FUNCTIONS = "step_functions"


class PauseState(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"


class IngestStatus(StrEnum):
    PENDING = "pending"
    DONE = "done"


class Method(StrEnum):
    GET = "GET"
    POST = "POST"


class Format(StrEnum):
    HTML = "html"
    JSON = "json"
    MARKDOWN = "markdown"
    PLAINTEXT = "plaintext"
    PDF = "pdf"


class FailureReason(StrEnum):
    """Why a task failed, in the contract's coarse words."""

    AUTH_FAILED = "auth_failed"
    BLOCKED = "blocked"
    BAD_TARGET = "bad_target"
    RATE_LIMITED = "rate_limited"
    TIMEOUT = "timeout"
    GATEWAY_ERROR = "gateway_error"
    OTHER = "other"


class RunFailure(StrEnum):
    """The account-level errors that fail a whole run."""

    INSUFFICIENT_CREDITS = "insufficient_credits"
    SUBSCRIPTION_INACTIVE = "subscription_inactive"
    API_KEY_CAP_REACHED = "api_key_cap_reached"


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """RFC 9457 problem details, as stored on a failed task and answered by the API."""

    type: str
    title: str
    status: int
    code: str
    detail: str | None = None
    instance: str | None = None


class Webhook(msgspec.Struct, frozen=True):
    url: str
    signature: bool = False


class Result(msgspec.Struct, frozen=True, array_like=True):
    """Where a body lies and how to tell that it is the right one."""

    key: str
    size_bytes: int
    sha256: str
    content_type: str
    http_status: int


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One try at a task, as its history shows it."""

    number: int
    started_at: float
    ended_at: float
    problem: Problem | None = None
    credits: int = 0
    cost_micros: int = 0


class TaskSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a list, checked and normalised: what to fetch, before it is a task of a run.

    `sealed` holds custom headers and the request body, encrypted: both may carry secrets.
    """

    index: int
    url: str
    method: Method = Method.GET
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    params: dict[str, str] | None = None
    sealed: str | None = None
    problem: Problem | None = None


class StagedList(msgspec.Struct, frozen=True, tag="staged"):
    """A batch that is read from a blob of TaskSpec lines; ids derive from `origin_run_id`."""

    key: str
    origin_run_id: RunId
    origin_batch_id: BatchId


class RowsOf(msgspec.Struct, frozen=True, tag="rows"):
    """A batch that replays the rows of an earlier run, or of one batch of it.

    Those whose status is in `retry` start over, unless `reasons` or `hosts` leave them out; the
    others are inherited with their results.
    """

    run_id: RunId
    retry: frozenset[TaskStatus]
    batch_id: BatchId | None = None
    reasons: frozenset[FailureReason] | None = None
    hosts: frozenset[str] | None = None


Source = StagedList | UploadedList | RowsOf


class Job(msgspec.Struct, frozen=True):
    job_id: JobId
    caller: CallerId
    status: JobStatus
    created_at: float
    updated_at: float
    format: Format = Format.HTML
    params: dict[str, str] = {}
    headers_sealed: str | None = None
    auth_sealed: str | None = None
    external_id: str | None = None
    name: str | None = None
    metadata: dict[str, str] | None = None
    webhook: Webhook | None = None
    max_inflight: int = limits.MAX_INFLIGHT
    max_attempts: int = limits.MAX_ATTEMPTS
    priority: int = 1
    shard_count: int = 1
    runs_count: int = 0
    latest_run_id: RunId | None = None
    active_run_id: RunId | None = None
    type: JobType = JobType.REGULAR
    result_ttl_days: int = limits.RESULT_TTL_DAYS
    budget: BudgetCap | None = None
    host_limits: HostLimits | None = None
    task_token_sealed: str | None = None


class Run(msgspec.Struct, frozen=True):
    job_id: JobId
    run_id: RunId
    caller: CallerId
    sequence: int
    status: RunStatus
    created_at: float
    updated_at: float
    shard_count: int = 1
    pause_state: PauseState = PauseState.ACTIVE
    planned: int = 0
    total: int = 0
    open_batches: int = 0
    batches_seq: int = 0
    last_batch_received: bool = False
    ingest_status: IngestStatus | None = None
    stop_requested_at: float | None = None
    stop_reason: str | None = None
    failure_reason: RunFailure | None = None
    failure_detail: str | None = None
    rerun_of: RunId | None = None
    retried: int = 0
    source_run_ids: tuple[RunId, ...] = ()
    ended_at: float | None = None
    scheduled_for: float | None = None
    expires_at: float | None = None
    sweep_at: float | None = None
    budget: BudgetCap | None = None
    queue_closed: bool = False


class Batch(msgspec.Struct, frozen=True):
    """One admitted list on its way into a run: the durable intent to ingest it (SPEC 5.3)."""

    job_id: JobId
    run_id: RunId
    batch_id: BatchId
    status: BatchStatus
    total: int
    created_at: float
    updated_at: float
    source: Source | None = None
    epoch: int = 0
    done: int = 0
    cursor: str | None = None
    failures: int = 0
    source_run_ids: tuple[RunId, ...] = ()


class Stats(msgspec.Struct, frozen=True):
    """The counters of one shard of a run; `status` is the gate that settles pass through.

    `retrying` are tasks between two tries: tried, not ended, and in nobody's hand.
    """

    job_id: JobId
    run_id: RunId
    shard: int
    status: GateStatus
    admitted: int = 0
    done: int = 0
    successful: int = 0
    failed: int = 0
    auth_failed: int = 0
    blocked: int = 0
    bad_target: int = 0
    rate_limited: int = 0
    timeout: int = 0
    gateway_error: int = 0
    other: int = 0
    credits: int = 0
    cost_micros: int = 0
    retrying: int = 0
    stored_bytes: int = 0


class Task(msgspec.Struct, frozen=True):
    run_id: RunId
    task_id: TaskId
    shard: int
    batch_id: BatchId
    index: int
    url: str
    status: TaskStatus
    created_at: float
    updated_at: float
    method: Method = Method.GET
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    params: dict[str, str] | None = None
    sealed: str | None = None
    claim: int = 0
    claim_until: float = 0.0
    attempts: int = 0
    handed_back: int = 0
    started_at: float | None = None
    result: Result | None = None
    problem: Problem | None = None
    reason: FailureReason | None = None
    history: tuple[Attempt, ...] = ()
    credits: int = 0
    cost_micros: int = 0
    source_run_id: RunId | None = None


class KeyRecord(msgspec.Struct, frozen=True):
    """What an Idempotency-Key was used for: who works on it now, and the answer once there is one.

    `subject` is the id of whatever the request creates, minted with the claim, so that any retry
    finishes the same thing.
    """

    key_id: str
    caller: CallerId
    fingerprint: str
    subject: str
    owner: str
    claimed_until: float
    expires_at: float
    response_status: int | None = None
    response_body: str | None = None


class Notice(msgspec.Struct, frozen=True):
    """An event to be delivered by its channel, written with the change it tells of."""

    notice_id: NoticeId
    job_id: JobId
    run_id: RunId
    event_type: str
    status: NoticeStatus
    occurred_at: float
    due_at: float
    payload: str
    attempts: int = 0
    last_error: str | None = None
    due_since: float = 0.0
    claim: int = 0
    tries: tuple[Try, ...] = ()
    channel: NoticeChannel = NoticeChannel.WEBHOOK


class Scrub(msgspec.Struct, frozen=True):
    """The intent to remove what is left of a deleted job, or of one of its runs."""

    job_id: JobId
    run_id: RunId | None
    scrub_id: str
    shard_count: int
    due_at: float
    passes_left: int


class TaskRef(msgspec.Struct, frozen=True, array_like=True):
    """What a queue carries: enough to find the task's row without reading the job."""

    job_id: JobId
    run_id: RunId
    task_id: TaskId
    shard: int
