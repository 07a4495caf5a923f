"""Responses: the shapes that Conveyor answers with (SPEC 4).

A field with a default is left out when it has nothing to say; one without is always there.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from conveyor.domain.errors import InvalidTask
from conveyor.domain.ids import TASK_ID_PATTERN, ULID_PATTERN
from conveyor.domain.model import (
    Format,
    IngestStatus,
    JobStatus,
    Method,
    PauseState,
    Problem,
    RunFailure,
    RunStatus,
    TaskStatus,
)
from conveyor.wire.limits import BudgetInput, BudgetResponse, HostLimitsInput

Ulid = Annotated[str, Meta(pattern=ULID_PATTERN)]
TaskName = Annotated[str, Meta(pattern=TASK_ID_PATTERN)]
Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count = Annotated[int, Meta(ge=0)]


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


class Spend(msgspec.Struct, frozen=True):
    """What was charged, as the gateway told; indicative."""

    credits: Count
    cost: Annotated[float, Meta(ge=0)]


class TaskSpend(msgspec.Struct, frozen=True):
    """What a task was charged, over all its tries and for the latest."""

    total: Spend
    last_attempt: Spend


class RunStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a run's tasks: `completed`, `inflight` and `pending` add up to `total`."""

    total: Count
    completed: Count
    successful: Count
    failed: Count
    inflight: Count
    pending: Count
    spend: Spend
    failure_reasons: dict[str, Count] = {}


class ReceiptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a stop let go of. `abandoned` are calls that a gateway may still be working on."""

    inflight: Count
    leases: Count
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
    receipt: ReceiptResponse | None = None
    budget: BudgetResponse | None = None


class WebhookResponse(msgspec.Struct, frozen=True):
    url: str
    signature: bool


class JobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job: what its runs have in common, and the latest of them."""

    job_id: Ulid
    type: str
    status: JobStatus
    format: Format
    created_at: Instant
    updated_at: Instant
    max_inflight: int
    max_attempts: int
    priority: int
    zenrows_params: dict[str, str] = {}
    external_id: str | None = None
    name: str | None = None
    metadata: dict[str, str] | None = None
    webhook: WebhookResponse | None = None
    latest_run: RunResponse | None = None
    budget: BudgetInput | None = None
    host_limits: HostLimitsInput | None = None


class SubmitJobResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    job_id: Ulid
    status: JobStatus
    accepted_tasks: Count
    latest_run: RunResponse
    webhook: WebhookResponse | None = None


class AddTasksResponse(msgspec.Struct, frozen=True, kw_only=True):
    accepted_tasks: Count
    job_status: JobStatus
    latest_run: RunResponse


class RerunJobResponse(msgspec.Struct, frozen=True, kw_only=True):
    job_id: Ulid
    status: JobStatus
    latest_run: RunResponse
    rerun_of: Ulid
    retried_tasks: Count
    inherited_tasks: Count


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
    status: TaskStatus
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


class HealthResponse(msgspec.Struct, frozen=True):
    status: str
