"""Responses: the types of all response bodies (docs/api.md).

A field with a default is omitted when it has that default. A field without one is always present.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from conveyor.domain.errors import InvalidTask
from conveyor.domain.export_record import ExportFormat, ExportOrder, ExportStatus, Manifest
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
from conveyor.domain.schedule import ScheduleStatus
from conveyor.schemas.requests import BudgetInput, HostLimitsInput
from conveyor.schemas.schedule import JobSchedule, SkippedFires

Ulid = Annotated[str, Meta(pattern=ULID_PATTERN)]
TaskName = Annotated[str, Meta(pattern=TASK_ID_PATTERN)]
Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count = Annotated[int, Meta(ge=0)]


class ResultStatus(StrEnum):
    """The status of a task, as results show it."""

    PENDING = "pending"  #: The task waits for its first attempt, or for a retry.
    PROCESSING = "processing"  #: A worker has the task.
    SUCCESSFUL = "successful"  #: The page was fetched and its body is stored.
    FAILED = "failed"  #: The task has ended without a page.
    EXPIRED = "expired"  #: The task was successful, but its body is no longer stored.


class FieldError(msgspec.Struct, frozen=True):
    """One invalid field."""

    pointer: str  #: A JSON pointer into the body, or a slash and the name of a query parameter.
    detail: str  #: What is wrong with it.


class ProblemResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Problem details after RFC 9457. Programs should branch on `code`."""

    type: str  #: `urn:conveyor:problem:` followed by the code.
    title: str  #: The kind of problem, for people.
    status: int  #: The HTTP status of the response.
    code: str  #: The word that programs branch on.
    detail: str | None = None  #: What happened this time, for people.
    instance: str | None = None  #: The X-Request-ID of the request.
    errors: list[FieldError] = []  #: The invalid fields of the request.
    invalid_tasks: list[InvalidTask] = []  #: The first invalid lines of a list.
    quota: str | None = None  #: The name of the quota that is used up.


class QuotaResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One quota of a caller."""

    name: str  #: The name of the quota.
    limit: Count | None  #: The largest allowed use; null if there is no limit.
    used: Count | None  #: The current use; null if the use is not counted.


class QuotasResponse(msgspec.Struct, frozen=True):
    """The quotas of this server."""

    quotas: list[QuotaResponse]  #: Every quota, with the caller's use.


class Spend(msgspec.Struct, frozen=True):
    """The charge that the gateway reported. It is indicative."""

    credits: Count  #: Credits of the gateway.
    cost: Annotated[float, Meta(ge=0)]  #: Money, in the currency of the gateway.


class TaskSpend(msgspec.Struct, frozen=True):
    """The charge of a task."""

    total: Spend  #: The charge of all attempts.
    last_attempt: Spend  #: The charge of the latest attempt.


class RunStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a run's tasks. `completed`, `inflight`, `retrying` and `pending` add up to
    `total`."""

    total: Count  #: Tasks of the run.
    completed: Count  #: Tasks that have ended: `successful` and `failed`.
    successful: Count  #: Tasks whose page is stored.
    failed: Count  #: Tasks that ended without a page.
    inflight: Count  #: Tasks that a worker has.
    retrying: Count  #: Tasks that wait for a retry.
    pending: Count  #: Tasks that wait for their first attempt.
    spend: Spend  #: The charge of all tasks.
    failure_reasons: dict[str, Count] = {}  #: Failed tasks by reason.
    stored_bytes: Count = 0  #: Bytes of the stored bodies.


class WaitingResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a run waits."""

    reason: WaitReason  #: The main cause.
    detail: str  #: The cause as a sentence.
    since: Instant | None = None  #: When the run began to wait, if it is known.


class ReceiptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a stop released. A value is null if it is not known, for example while the service that
    counts leases cannot be reached."""

    complete: bool  #: Whether no process has an open fetch of the run.
    inflight: Count | None  #: Fetches that are in flight; 0 only in a complete receipt.
    leases: Count | None  #: Leases that are still held.
    released: Count  #: Leases that were released.
    abandoned: Count  #: Calls that were interrupted and that a remote gateway may still process.


class BudgetResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The budget of a run: `credits` or `cost`, and what is left of it."""

    left: float  #: The part that is neither spent nor reserved, in the unit of the budget.
    credits: int | None = None  #: The budget in credits.
    cost: float | None = None  #: The budget in money.


class RunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One execution of a job."""

    run_id: Ulid  #: The id of the run.
    job_id: Ulid  #: The id of its job.
    run_sequence: Annotated[int, Meta(ge=1)]  #: The number of the run among those of its job.
    status: RunStatus  #: The state of the run.
    terminal: bool  #: Whether the run has ended and will not change any more.
    trigger: str  #: What started the run: `manual` or `scheduled`.
    stats: RunStats  #: Counts of the tasks.
    last_batch_received: bool  #: Whether the run accepts no further list.
    created_at: Instant  #: When the run was created.
    updated_at: Instant  #: When the run last changed.
    pause_state: PauseState | None = None  #: `paused` while the run is paused.
    ingest_status: IngestStatus | None = None  #: The state of a list that is ingested later.
    stop_reason: str | None = None  #: Why the run was stopped.
    failure_reason: RunFailure | None = None  #: The account-level error that failed the run.
    failure_detail: str | None = None  #: The same in words.
    scheduled_for: Instant | None = None  #: The nominal time of a scheduled run.
    results_expire_at: Instant | None = None  #: When the results of an ended run expire.
    receipt: ReceiptResponse | None = None  #: What a stop released; only in the response to it.
    waiting_on: WaitingResponse | None = None  #: What delays the run; absent if nothing does.
    eta_seconds: Count | None = None  #: Seconds until the end at the recent rate.
    budget: BudgetResponse | None = None  #: The budget of the run.
    rate_per_s: Annotated[float, Meta(ge=0)] | None = None  #: Tasks that ended per second lately.


class WebhookResponse(msgspec.Struct, frozen=True):
    """The webhook of a job."""

    url: str  #: The URL of the receiver.
    signature: bool  #: Whether deliveries are signed.


class JobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job: the settings of its runs, and its latest run."""

    job_id: Ulid  #: The id of the job.
    type: JobType  #: Whether a schedule starts the runs.
    status: JobStatus  #: Whether the job accepts further lists.
    format: Format  #: The format of the bodies; it follows from the parameters.
    created_at: Instant  #: When the job was submitted.
    updated_at: Instant  #: When the job last changed.
    max_inflight: int  #: Tasks that may be fetched at the same time.
    max_attempts: int  #: Attempts that a task has before it fails.
    priority: int  #: The weight of the job among the jobs of its caller.
    result_ttl_days: int  #: Days that results are kept after the end of their run.
    zenrows_params: dict[str, str] = {}  #: Scraper parameters of every line.
    external_id: str | None = None  #: The caller's own id for the job.
    name: str | None = None  #: The caller's name for the job.
    metadata: dict[str, str] | None = None  #: The caller's own data.
    webhook: WebhookResponse | None = None  #: The receiver of the ends of runs.
    schedule: JobSchedule | None = None  #: The schedule of a scheduled job.
    schedule_state: ScheduleStatus | None = None  #: Whether the schedule is paused.
    next_scheduled_run: Instant | None = None  #: When the schedule starts the next run.
    #: The next nominal times, at most five; the first is `next_scheduled_run`.
    next_scheduled_runs: list[Instant] = []
    skipped_fires: list[SkippedFires] = []  #: The latest nominal times without a run.
    latest_run: RunResponse | None = None  #: The newest run; a new scheduled job has none.
    budget: BudgetInput | None = None  #: The most that each run may spend.
    host_limits: HostLimitsInput | None = None  #: The limits of each host.
    dedup: bool = False  #: Whether the duplicates of each list share one fetch.


class SubmitJobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The job that was created, and its first run."""

    job_id: Ulid  #: The id of the job.
    status: JobStatus  #: Whether the job accepts further lists.
    #: Lines that were accepted. For a long uploaded list, an upper bound.
    accepted_tasks: Count
    latest_run: RunResponse | None = None  #: The first run; a scheduled job has none yet.
    webhook: WebhookResponse | None = None  #: The receiver of the ends of runs.


class AddTasksResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a further list."""

    accepted_tasks: Count  #: Lines that were accepted.
    job_status: JobStatus  #: Whether the job accepts further lists.
    latest_run: RunResponse  #: The run that the tasks were added to.


class RerunJobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The new run of a job."""

    job_id: Ulid  #: The id of the job.
    status: JobStatus  #: Whether the job accepts further lists.
    latest_run: RunResponse  #: The new run.
    retried_tasks: Count  #: Tasks that start over.
    inherited_tasks: Count  #: Tasks whose result is that of the earlier run.
    rerun_of: Ulid | None = None  #: The run whose tasks are repeated.


class ListJobsResponse(msgspec.Struct, frozen=True):
    """A page of jobs, newest first."""

    jobs: list[JobResponse]  #: The jobs; a page may have fewer than `limit`.
    next_cursor: str | None  #: The `cursor` of the next page; null if this is the last.


class ListJobRunsResponse(msgspec.Struct, frozen=True):
    """A page of runs, newest first."""

    runs: list[RunResponse]  #: The runs.
    next_cursor: str | None  #: The `cursor` of the next page; null if this is the last.


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task of a run, with a link to its body if there is one."""

    task_id: TaskName  #: The id of the task.
    run_id: Ulid  #: The id of its run.
    index: Count  #: The position of the line in the submitted list, from 0.
    url: str  #: The URL of the line.
    status: ResultStatus  #: The state of the task.
    result_url: str | None  #: A link to the body that works without a key, for a while.
    created_at: Instant  #: When the task was created.
    updated_at: Instant  #: When the task last changed.
    type: Format | None = None  #: The format of the body.
    method: Method | None = None  #: The method of the request, if it is not GET.
    external_id: str | None = None  #: The caller's own id for the line.
    metadata: dict[str, str] | None = None  #: The caller's own data for the line.
    error: Problem | None = None  #: Why the task, or its latest attempt, failed.
    source_run_id: Ulid | None = None  #: The earlier run that an inherited result comes from.
    duplicate_of: TaskName | None = None  #: The task whose fetch and outcome this one shares.
    spend: TaskSpend | None = None  #: The charge of the task.
    reason: str | None = None  #: The failure reason that the run counts it under.
    attempts: Count = 0  #: Attempts that reported an outcome.
    started_at: Instant | None = None  #: When the fetch that is in flight began.
    http_status: int | None = None  #: The site's status of a stored body.
    size_bytes: Count | None = None  #: Bytes of the stored body.


class ListResultsResponse(msgspec.Struct, frozen=True):
    """A page of tasks."""

    results: list[TaskResult]  #: The tasks; a page may have fewer than `limit`, or none.
    next_cursor: str | None  #: The `cursor` of the next page; null if this is the last.


class HostResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tasks of one host."""

    host: str  #: The host, without a port.
    total: Count  #: Tasks of the host.
    successful: Count  #: Tasks whose page is stored.
    failed: Count  #: Tasks that ended without a page.
    inflight: Count  #: Tasks that a worker has.
    bytes: Count  #: Bytes of the stored bodies.
    credits: Count  #: Credits that were charged.
    failure_reasons: dict[str, Count] = {}  #: Failed tasks by reason.
    median_s: float | None = None  #: The median duration of the last attempts, in seconds.


class ListHostsResponse(msgspec.Struct, frozen=True):
    """The hosts of a run."""

    hosts: list[HostResponse]  #: The hosts, those with the most failures first.
    #: Whether every row was read. If not, the figures are those of a part of the run.
    complete: bool


class OpenFetchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is being fetched."""

    task_id: TaskName  #: The task.
    index: Count  #: The line's position in the submitted list.
    url: str  #: The URL that is fetched.
    attempts: Count  #: Earlier attempts that reported an outcome.
    started_at: Instant  #: When the fetch began.
    age_s: Annotated[float, Meta(ge=0)]  #: Seconds since the fetch began.


class ListFetchesResponse(msgspec.Struct, frozen=True):
    """The longest fetches of a run."""

    fetches: list[OpenFetchResponse]  #: The fetches, the oldest first.


class SeriesBucket(msgspec.Struct, frozen=True, kw_only=True):
    """What ended, was stored and was charged between two times."""

    since: Instant  #: Where the bucket begins.
    until: Instant  #: Where the bucket ends, and the next one begins.
    successful: Count  #: Tasks that ended successfully.
    failed: Count  #: Tasks that failed.
    failure_reasons: dict[str, Count]  #: Failed tasks by reason.
    bytes: Count  #: Bytes of the bodies that were stored.
    spend: Spend  #: What was charged.


class SeriesResponse(msgspec.Struct, frozen=True):
    """The history of a run in buckets of about a minute. Their sum is the run's `stats`."""

    buckets: list[SeriesBucket]  #: The buckets, the oldest first.


class TaskHistoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a task."""

    attempt: Annotated[int, Meta(ge=1)]  #: The number of the attempt, from 1.
    started_at: Instant  #: When the attempt began.
    ended_at: Instant  #: When the attempt ended.
    spend: Spend  #: The charge of the attempt.
    error: Problem | None = None  #: Why the attempt failed.


class TaskHistoryResponse(msgspec.Struct, frozen=True):
    """The attempts at a task."""

    events: list[TaskHistoryEvent]  #: The latest attempts, oldest first.


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated cost if each page is fetched successfully once. It is not a guarantee."""

    credits_min: Count  #: Credits at least.
    credits_max: Count  #: Credits at most.


class SubmitDryRunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The effect that a submit would have."""

    dry_run: bool  #: Always true.
    would_answer: int  #: The expected status of the real response.
    valid_tasks: Count  #: Valid lines of the list.
    invalid_tasks_count: Count  #: Invalid lines of the list.
    estimate: Estimate  #: The estimated cost.
    invalid_reasons: dict[str, Count] = {}  #: Invalid lines by reason.
    invalid_tasks: list[InvalidTask] = []  #: The first invalid lines.


class RerunDryRunResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The effect that a rerun would have."""

    dry_run: bool  #: Always true.
    would_answer: int  #: The expected status of the real response.
    rerun_of: Ulid | None  #: The run whose tasks would be repeated.
    retried_tasks: Count  #: Tasks that would start over.
    inherited_tasks: Count  #: Tasks whose result would be that of the earlier run.
    estimate: Estimate | None = None  #: The estimated cost, if it is known.


class AuditResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A recount of a run from its rows, and a check of some of its bodies."""

    job_id: Ulid  #: The id of the job.
    run_id: Ulid  #: The id of the run.
    ok: bool  #: Whether the recount matches the counters and the bodies match their tasks.
    #: Whether the run continued during the recount. Then the counts lie between the counters before
    #: and after it.
    live: bool
    counts: dict[str, Count]  #: The recount.
    differences: list[Difference]  #: Counters that differ from the recount.
    bodies_checked: Count  #: Bodies that were read.
    bad_bodies: list[BadBody]  #: Bodies that are missing or do not match their task.


class EventResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An event of one of the caller's jobs."""

    id: str  #: The position in the event log.
    type: EventType  #: What happened.
    occurred_at: Instant  #: When it happened.
    data: dict[str, Any]  #: The ids concerned and, for the end of a run, its counters.


class ListEventsResponse(msgspec.Struct, frozen=True):
    """A page of the event log, oldest first."""

    events: list[EventResponse]  #: The events.
    last_id: str  #: The `after` of the next request.


class StartExportResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The export that was requested."""

    export_id: Ulid  #: The id of the export.
    status: ExportStatus  #: The state of the export.
    format: ExportFormat  #: The format of the file.
    order: ExportOrder = ExportOrder.ID  #: The order of the tasks in the file.
    destination: str | None = None  #: Where the file is put, without credentials.
    created_at: Instant  #: When the export was requested.
    expires_at: Instant  #: When the export and its file are removed.


class ExportResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An export. A completed one has a link to the file and its manifest."""

    export_id: Ulid  #: The id of the export.
    status: ExportStatus  #: The state of the export.
    format: ExportFormat  #: The format of the file.
    order: ExportOrder = ExportOrder.ID  #: The order of the tasks in the file.
    destination: str | None = None  #: Where the file is put, without credentials.
    created_at: Instant  #: When the export was requested.
    expires_at: Instant  #: When the export and its file are removed.
    total: Count  #: Tasks of the run.
    done: Count  #: Tasks that are in the file so far.
    error: str | None = None  #: Why the export failed, or its latest delivery.
    download_url: str | None = None  #: A link to the file that works without a key, for a while.
    file_name: str | None = None  #: The name of the file.
    size_bytes: Count | None = None  #: Bytes of the file.
    sha256: str | None = None  #: The digest of the file, in hexadecimal.
    manifest: Manifest | None = None  #: The content of the file, to verify it by.


class UploadTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where to upload a list. It needs no API key."""

    method: str  #: The method of the upload.
    url: Annotated[str, Meta(extra_json_schema={"format": "uri"})]  #: The URL of the upload.
    headers: dict[str, str]  #: Headers that the upload must have.
    expires_at: Instant  #: When the URL ends.


class CreateJobInputResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A slot for a list."""

    file_input_id: Ulid  #: The id of the slot, for the submit.
    upload: UploadTarget  #: Where to upload the list.
    expires_at: Instant  #: When the slot ends.


class UploadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The stored list."""

    size_bytes: Count  #: Bytes of the list as it was sent.
    sha256: str  #: The digest of these bytes, in hexadecimal.


class HealthResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a process."""

    status: str  #: `ok` or `ready`.
    version: str | None = None  #: The release of the program; only in `/healthz`.
    build: str | None = None  #: The build of the program, such as a commit; only in `/healthz`.


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item that `conveyor check` reports of a deployment. `problem` is None if the item is in
    order; then there is no remedy."""

    name: str
    problem: str | None = None
    remedy: str = ""


# Webhooks, signing keys and deliveries. Only the response to a rotation contains a secret.


class HmacKeyMeta(msgspec.Struct, frozen=True):
    """A signing key without its secret."""

    kid: Ulid  #: The id of the key.
    created_at: Instant  #: When the key was created.


class HmacKeyList(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signing keys of a caller."""

    active: HmacKeyMeta | None = None  #: The key that signs.
    candidate: HmacKeyMeta | None = None  #: The key of a rotation in progress; it signs too.


class HmacKeyCreated(msgspec.Struct, frozen=True):
    """A new signing key."""

    kid: Ulid  #: The id of the key.
    secret: str  #: 32 bytes in base64. No other response contains them.
    created_at: Instant  #: When the key was created.


class HmacKeyFinalized(msgspec.Struct, frozen=True):
    """The signing key that a rotation made the active one."""

    active_kid: Ulid  #: The id of the key.
    created_at: Instant  #: When the key was created.


class WebhookTestResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a test event."""

    delivered: bool  #: Whether the receiver answered with 2xx.
    event_id: Ulid  #: The id of the event.
    elapsed_ms: Count  #: The duration of the attempt in milliseconds.
    status_code: int | None = None  #: The status that the receiver answered with.
    error: str | None = None  #: Why the attempt failed.


class DeliveryTry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One delivery attempt. The response body of the receiver is not stored."""

    at: Instant  #: When the attempt began.
    elapsed_ms: Count  #: The duration of the attempt in milliseconds.
    status_code: int | None = None  #: The status that the receiver answered with.
    error: str | None = None  #: Why the attempt failed.


class DeliveryResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event and the state of its delivery."""

    event_id: str  #: The id of the event; receivers deduplicate by it.
    event_type: str  #: How the run ended: `run.completed`, `run.stopped` or `run.failed`.
    run_id: Ulid  #: The id of the run.
    status: NoticeStatus  #: The state of the delivery.
    occurred_at: Instant  #: When the run ended.
    attempts: Count  #: Delivery attempts.
    tries: list[DeliveryTry]  #: The latest of them, oldest first.
    next_try_at: Instant | None = None  #: When the next attempt is due.
    last_error: str | None = None  #: Why the latest attempt failed.
    channel: NoticeChannel = NoticeChannel.WEBHOOK  #: How the event is delivered.


class ListDeliveriesResponse(msgspec.Struct, frozen=True):
    """A page of webhook events, newest first."""

    deliveries: list[DeliveryResponse]  #: The events with their attempts.
    next_cursor: str | None  #: The `cursor` of the next page; null if this is the last.
