"""Responses: the shapes that Conveyor answers with (docs/api.md).

A field with a default is left out when it has nothing to say; one without is always there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from conveyor.domain.errors import InvalidTask
from conveyor.domain.event import EventType
from conveyor.domain.export.export import ExportFormat, ExportStatus, Manifest
from conveyor.domain.ids import TASK_ID_PATTERN, ULID_PATTERN
from conveyor.domain.model import (
    Format,
    IngestStatus,
    JobStatus,
    JobType,
    Method,
    PauseState,
    Problem,
    RunFailure,
    RunStatus,
)
from conveyor.domain.run.audit import BadBody, Difference
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.domain.schedule.schedule import ScheduleStatus
from conveyor.schemas.budget import BudgetInput, BudgetResponse, HostLimitsInput
from conveyor.schemas.schedules import JobSchedule, SkippedFires

Ulid = Annotated[str, Meta(pattern=ULID_PATTERN)]
TaskName = Annotated[str, Meta(pattern=TASK_ID_PATTERN)]
Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count = Annotated[int, Meta(ge=0)]


class ResultStatus(StrEnum):
    """How a task stands; an expired one was successful, and its body is no longer kept."""

    PENDING = "pending"
    PROCESSING = "processing"
    SUCCESSFUL = "successful"
    FAILED = "failed"
    EXPIRED = "expired"


class FieldError(msgspec.Struct, frozen=True):
    """One field that is wrong; `pointer` is a JSON pointer, or a query parameter after a slash."""

    pointer: str
    detail: str


class ProblemResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Problem details after RFC 9457; `code` is the word to branch on."""

    type: str
    title: str
    status: int
    code: str
    detail: str | None = None
    instance: Annotated[str, Meta(description="The X-Request-ID of the request.")] | None = None
    errors: list[FieldError] = []
    invalid_tasks: list[InvalidTask] = []
    quota: Annotated[str, Meta(description="Which quota is used up.")] | None = None


class QuotaResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One quota: without a limit it is lifted; `used` is null where nothing is counted."""

    name: str
    limit: Count | None
    used: Count | None


class QuotasResponse(msgspec.Struct, frozen=True):
    quotas: list[QuotaResponse]


class Spend(msgspec.Struct, frozen=True):
    """What was charged, as the gateway told; indicative."""

    credits: Count
    cost: Annotated[float, Meta(ge=0)]


class TaskSpend(msgspec.Struct, frozen=True):
    """What a task was charged, over all its tries and for the latest."""

    total: Spend
    last_attempt: Spend


class RunStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a run's tasks: `completed`, `inflight`, `retrying` and `pending` add up to `total`.

    `retrying` are tasks between two tries, `pending` those that wait for their first.
    """

    total: Count
    completed: Count
    successful: Count
    failed: Count
    inflight: Count
    retrying: Count
    pending: Count
    spend: Spend
    failure_reasons: dict[str, Count] = {}


class WaitingResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What holds a run up: the main cause in a word and in a sentence."""

    reason: WaitReason
    detail: str
    since: Instant | None = None


class ReceiptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a stop let go of. `abandoned` are calls that a gateway may still be working on.

    `complete` says that no process has a fetch of the run open. Where that is not known, neither
    are `inflight` and `leases`: null, while the service that counts leases cannot be reached.
    """

    complete: bool
    inflight: Count | None
    leases: Count | None
    released: Count
    abandoned: Count


class RunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One execution of a job."""

    run_id: Ulid
    job_id: Ulid
    run_sequence: Annotated[int, Meta(ge=1)]
    status: RunStatus
    terminal: bool
    trigger: str
    stats: RunStats
    last_batch_received: bool
    created_at: Instant
    updated_at: Instant
    pause_state: PauseState | None = None
    ingest_status: IngestStatus | None = None
    stop_reason: str | None = None
    failure_reason: RunFailure | None = None
    failure_detail: str | None = None
    scheduled_for: Annotated[Instant, Meta(description="The time it was fired for.")] | None = None
    results_expire_at: Instant | None = None
    receipt: ReceiptResponse | None = None
    waiting_on: WaitingResponse | None = None
    eta_seconds: (
        Annotated[int, Meta(ge=0, description="If it goes on as it went lately.")] | None
    ) = None
    budget: BudgetResponse | None = None


class WebhookResponse(msgspec.Struct, frozen=True):
    url: str
    signature: bool


class JobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job: what its runs have in common, and the latest of them."""

    job_id: Ulid
    type: JobType
    status: JobStatus
    format: Format
    created_at: Instant
    updated_at: Instant
    max_inflight: int
    max_attempts: int
    priority: int
    result_ttl_days: int
    zenrows_params: dict[str, str] = {}
    external_id: str | None = None
    name: str | None = None
    metadata: dict[str, str] | None = None
    webhook: WebhookResponse | None = None
    schedule: JobSchedule | None = None
    schedule_state: ScheduleStatus | None = None
    next_scheduled_run: Instant | None = None
    skipped_fires: Annotated[list[SkippedFires], Meta(description="The latest of them.")] = []
    latest_run: RunResponse | None = None
    budget: BudgetInput | None = None
    host_limits: HostLimitsInput | None = None


class SubmitJobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    job_id: Ulid
    status: JobStatus
    accepted_tasks: Count
    latest_run: Annotated[
        RunResponse | None, Meta(description="A scheduled job has none until it fires.")
    ] = None
    webhook: WebhookResponse | None = None


class AddTasksResponse(msgspec.Struct, frozen=True, kw_only=True):
    accepted_tasks: Count
    job_status: JobStatus
    latest_run: RunResponse


class RerunJobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    job_id: Ulid
    status: JobStatus
    latest_run: RunResponse
    retried_tasks: Count
    inherited_tasks: Count
    rerun_of: Ulid | None = None


class ListJobsResponse(msgspec.Struct, frozen=True):
    jobs: list[JobResponse]
    next_cursor: str | None


class ListJobRunsResponse(msgspec.Struct, frozen=True):
    runs: list[RunResponse]
    next_cursor: str | None


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task of a run, with the way to its body once there is one."""

    task_id: TaskName
    run_id: Ulid
    index: Annotated[int, Meta(ge=0, description="The line's position in the submitted list.")]
    url: str
    status: ResultStatus
    result_url: str | None
    created_at: Instant
    updated_at: Instant
    type: Format | None = None
    method: Method | None = None
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    error: Problem | None = None
    source_run_id: Ulid | None = None
    spend: TaskSpend | None = None


class ListResultsResponse(msgspec.Struct, frozen=True):
    results: list[TaskResult]
    next_cursor: str | None


class TaskHistoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try at a task."""

    attempt: Annotated[int, Meta(ge=1)]
    started_at: Instant
    ended_at: Instant
    spend: Spend
    error: Problem | None = None


class TaskHistoryResponse(msgspec.Struct, frozen=True):
    events: list[TaskHistoryEvent]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages would cost if each were fetched once and well; no promise."""

    credits_min: Count
    credits_max: Count


class SubmitDryRunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a submit would do. `would_answer` is its status, as far as that can be foreseen."""

    dry_run: bool
    would_answer: int
    valid_tasks: Count
    invalid_tasks_count: Count
    estimate: Estimate
    invalid_reasons: dict[str, Count] = {}
    invalid_tasks: list[InvalidTask] = []


class RerunDryRunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rerun would do. `would_answer` is its status, as far as that can be foreseen."""

    dry_run: bool
    would_answer: int
    rerun_of: Ulid | None
    retried_tasks: Count
    inherited_tasks: Count
    estimate: Estimate | None = None


class AuditResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A run recounted from its rows: `ok` when nothing contradicts its counters.

    `live` says that the run went on meanwhile: counts then lie between those before and after.
    """

    job_id: Ulid
    run_id: Ulid
    ok: bool
    live: bool
    counts: dict[str, Count]
    differences: list[Difference]
    bodies_checked: Count
    bad_bodies: list[BadBody]


class EventResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to one of the caller's jobs; `id` is its place in the feed."""

    id: str
    type: EventType
    occurred_at: Instant
    data: dict[str, Any]


class ListEventsResponse(msgspec.Struct, frozen=True):
    """Events, oldest first; `last_id` is what to ask behind the next time."""

    events: list[EventResponse]
    last_id: str


class StartExportResponse(msgspec.Struct, frozen=True, kw_only=True):
    export_id: Ulid
    status: ExportStatus
    format: ExportFormat
    created_at: Instant
    expires_at: Instant


class ExportResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An export; once it is completed, with a link to the file and what is in it."""

    export_id: Ulid
    status: ExportStatus
    format: ExportFormat
    created_at: Instant
    expires_at: Instant
    total: Annotated[int, Meta(ge=0, description="Tasks of the run.")]
    done: Annotated[int, Meta(ge=0, description="Tasks that are in the file so far.")]
    error: str | None = None
    download_url: Annotated[str, Meta(description="Works without a key, for a while.")] | None = (
        None
    )
    file_name: str | None = None
    size_bytes: Count | None = None
    sha256: str | None = None
    manifest: Manifest | None = None


class UploadTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to put the list; it needs no API key."""

    method: str
    url: Annotated[str, Meta(extra_json_schema={"format": "uri"})]
    headers: dict[str, str]
    expires_at: Instant


class CreateJobInputResponse(msgspec.Struct, frozen=True, kw_only=True):
    file_input_id: Ulid
    upload: UploadTarget
    expires_at: Instant


class UploadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What was stored."""

    size_bytes: Count
    sha256: str


class HealthResponse(msgspec.Struct, frozen=True):
    status: str
