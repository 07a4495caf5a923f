"""Responses: the types of all response bodies (docs/api.md).

A field with a default is omitted when it has that default. A field without one is always present.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from conveyor.domain.errors import InvalidTask
from conveyor.domain.export.export import ExportFormat, ExportStatus, Manifest
from conveyor.domain.ids import TASK_ID_PATTERN, ULID_PATTERN
from conveyor.domain.model import (
    EventType,
    Format,
    IngestStatus,
    JobStatus,
    JobType,
    Method,
    NoticeChannel,
    NoticeStatus,
    PauseState,
    Problem,
    RunFailure,
    RunStatus,
)
from conveyor.domain.run.audit import BadBody, Difference
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.domain.schedule.schedule import ScheduleStatus
from conveyor.schemas.requests import BudgetInput, HostLimitsInput
from conveyor.schemas.schedule import JobSchedule, SkippedFires

Ulid = Annotated[str, Meta(pattern=ULID_PATTERN)]
TaskName = Annotated[str, Meta(pattern=TASK_ID_PATTERN)]
Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count = Annotated[int, Meta(ge=0)]


class ResultStatus(StrEnum):
    """The status of a task. An expired task was successful, but its body is no longer stored."""

    PENDING = "pending"
    PROCESSING = "processing"
    SUCCESSFUL = "successful"
    FAILED = "failed"
    EXPIRED = "expired"


class FieldError(msgspec.Struct, frozen=True):
    """One invalid field. `pointer` is a JSON pointer, or a slash and a query parameter."""

    pointer: str
    detail: str


class ProblemResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Problem details after RFC 9457. Programs should branch on `code`."""

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
    """One quota. A null `limit` means no limit. A null `used` means that use is not counted."""

    name: str
    limit: Count | None
    used: Count | None


class QuotasResponse(msgspec.Struct, frozen=True):
    quotas: list[QuotaResponse]


class Spend(msgspec.Struct, frozen=True):
    """The charge that the gateway reported. It is indicative."""

    credits: Count
    cost: Annotated[float, Meta(ge=0)]


class TaskSpend(msgspec.Struct, frozen=True):
    """The charge of a task, for all attempts and for the latest one."""

    total: Spend
    last_attempt: Spend


class RunStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a run's tasks: `completed`, `inflight`, `retrying` and `pending` add up to `total`.

    `retrying` counts tasks that wait for a retry, `pending` those that wait for their first
    attempt.
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
    stored_bytes: Annotated[int, Meta(ge=0, description="Bytes of the stored bodies.")] = 0


class WaitingResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a run waits: the main cause as a code and as a sentence."""

    reason: WaitReason
    detail: str
    since: Instant | None = None


class ReceiptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a stop released. `abandoned` counts calls that a gateway may still process.

    `complete` means that no process has an open fetch of the run. `inflight` and `leases` are null
    if they are not known, for example while the service that counts leases cannot be reached.
    """

    complete: bool
    inflight: Count | None
    leases: Count | None
    released: Count
    abandoned: Count


class BudgetResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The budget of a run and its unreserved part, both in the unit of the budget."""

    left: float
    credits: int | None = None
    cost: float | None = None


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
    rate_per_s: (
        Annotated[float, Meta(ge=0, description="Tasks that ended per second lately.")] | None
    ) = None


class WebhookResponse(msgspec.Struct, frozen=True):
    url: str
    signature: bool


class JobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job: the settings of its runs, and its latest run."""

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
    """One task of a run, with a link to its body if there is one."""

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
    reason: Annotated[str, Meta(description="Why it failed, as counted.")] | None = None
    attempts: Annotated[int, Meta(ge=0, description="Tries that reported an outcome.")] = 0
    started_at: (
        Annotated[Instant, Meta(description="Start of the fetch that is under way.")] | None
    ) = None
    http_status: Annotated[int, Meta(description="The site's status of a stored body.")] | None = (
        None
    )
    size_bytes: Annotated[int, Meta(ge=0, description="Bytes of the stored body.")] | None = None


class ListResultsResponse(msgspec.Struct, frozen=True):
    results: list[TaskResult]
    next_cursor: str | None


class HostResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tasks of one host. `median_s` is the duration of their last attempts."""

    host: str
    total: Count
    successful: Count
    failed: Count
    inflight: Count
    bytes: Count
    credits: Count
    failure_reasons: dict[str, Count] = {}
    median_s: float | None = None


class ListHostsResponse(msgspec.Struct, frozen=True):
    """The hosts of a run, those with the most failures first. If `complete` is false, the run has
    more rows than were read, and the figures are those of a part of it."""

    hosts: list[HostResponse]
    complete: bool


class TaskHistoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a task."""

    attempt: Annotated[int, Meta(ge=1)]
    started_at: Instant
    ended_at: Instant
    spend: Spend
    error: Problem | None = None


class TaskHistoryResponse(msgspec.Struct, frozen=True):
    events: list[TaskHistoryEvent]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated cost if each page is fetched successfully once. It is not a guarantee."""

    credits_min: Count
    credits_max: Count


class SubmitDryRunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The effect of a submit. `would_answer` is its expected status code."""

    dry_run: bool
    would_answer: int
    valid_tasks: Count
    invalid_tasks_count: Count
    estimate: Estimate
    invalid_reasons: dict[str, Count] = {}
    invalid_tasks: list[InvalidTask] = []


class RerunDryRunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The effect of a rerun. `would_answer` is its expected status code."""

    dry_run: bool
    would_answer: int
    rerun_of: Ulid | None
    retried_tasks: Count
    inherited_tasks: Count
    estimate: Estimate | None = None


class AuditResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A recount of a run from its rows. `ok` means that it matches the counters of the run.

    `live` means that the run continued during the recount. The counts then lie between the
    counters before and after it.
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
    """An event of one of the caller's jobs. `id` is its position in the event log."""

    id: str
    type: EventType
    occurred_at: Instant
    data: dict[str, Any]


class ListEventsResponse(msgspec.Struct, frozen=True):
    """Events, oldest first. `last_id` is the `after` of the next request."""

    events: list[EventResponse]
    last_id: str


class StartExportResponse(msgspec.Struct, frozen=True, kw_only=True):
    export_id: Ulid
    status: ExportStatus
    format: ExportFormat
    created_at: Instant
    expires_at: Instant


class ExportResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An export. A completed one has a link to the file and its manifest."""

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
    """The URL and the method of the upload. It needs no API key."""

    method: str
    url: Annotated[str, Meta(extra_json_schema={"format": "uri"})]
    headers: dict[str, str]
    expires_at: Instant


class CreateJobInputResponse(msgspec.Struct, frozen=True, kw_only=True):
    file_input_id: Ulid
    upload: UploadTarget
    expires_at: Instant


class UploadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The size and the digest of the stored list."""

    size_bytes: Count
    sha256: str


class HealthResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    #: The release of the program; only in `/healthz`.
    version: str | None = None
    #: The build of the program, such as a commit; only in `/healthz`.
    build: str | None = None


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item that `conveyor check` reports of a deployment. `problem` is None if the item is in
    order; then there is no remedy."""

    name: str
    problem: str | None = None
    remedy: str = ""


# Webhooks, signing keys and deliveries. Only the response to a rotation contains a secret.


class HmacKeyMeta(msgspec.Struct, frozen=True):
    """A signing key without its secret."""

    kid: Ulid
    created_at: Instant


class HmacKeyList(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signing keys: the active one, and the candidate of a rotation in progress."""

    active: HmacKeyMeta | None = None
    candidate: HmacKeyMeta | None = None


class HmacKeyCreated(msgspec.Struct, frozen=True):
    kid: Ulid
    secret: Annotated[str, Meta(description="32 bytes in base64; shown this once.")]
    created_at: Instant


class HmacKeyFinalized(msgspec.Struct, frozen=True):
    active_kid: Ulid
    created_at: Instant


class WebhookTestResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a test event."""

    delivered: bool
    event_id: Ulid
    elapsed_ms: Count
    status_code: int | None = None
    error: str | None = None


class DeliveryTry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One delivery attempt. The response body of the receiver is not stored."""

    at: Instant
    elapsed_ms: Count
    status_code: int | None = None
    error: str | None = None


class DeliveryResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event and the state of its delivery. `tries` has the latest attempts."""

    event_id: str
    event_type: str
    run_id: Ulid
    status: NoticeStatus
    occurred_at: Instant
    attempts: Count
    tries: list[DeliveryTry]
    next_try_at: Instant | None = None
    last_error: str | None = None
    channel: NoticeChannel = NoticeChannel.WEBHOOK


class ListDeliveriesResponse(msgspec.Struct, frozen=True):
    deliveries: list[DeliveryResponse]
    next_cursor: str | None
