"""Views: convert rows of the domain to responses. They are pure and return no secret
(docs/api.md)."""

from __future__ import annotations

import math
from base64 import b64encode
from datetime import UTC, datetime

import msgspec

from conveyor.domain.budget import MICROS, Budget, BudgetCap, Unit
from conveyor.domain.export.formats import ENCODERS
from conveyor.domain.export_record import Export, ExportStatus
from conveyor.domain.lifecycle import NOTICE_WAITING, RUN_TERMINAL, displayed_status
from conveyor.domain.model import (
    Attempt,
    DeliveryAttempt,
    Event,
    HostLimits,
    Job,
    Method,
    Notice,
    PauseState,
    SigningKey,
    SigningKeys,
    Task,
    TaskStatus,
    Webhook,
)
from conveyor.domain.run.series import Bucket
from conveyor.domain.run.wait_reason import RunOverview, Waiting
from conveyor.domain.schedule import Schedule, Skip, upcoming_times
from conveyor.schemas.requests import BudgetInput, HostLimitInput, HostLimitsInput
from conveyor.schemas.responses import (
    BudgetResponse,
    DeliveryResponse,
    DeliveryTry,
    EventResponse,
    ExportResponse,
    HmacKeyCreated,
    HmacKeyFinalized,
    HmacKeyList,
    HmacKeyMeta,
    JobResponse,
    OpenFetchResponse,
    ResultStatus,
    RunResponse,
    RunStats,
    SeriesBucket,
    Spend,
    TaskHistoryEvent,
    TaskHistoryResponse,
    TaskResult,
    TaskSpend,
    WaitingResponse,
    WebhookResponse,
)
from conveyor.schemas.schedule import SkippedFires, schedule_view

HIDDEN = "***"


def instant(at: float) -> str:
    """Formats a time as RFC 3339 in UTC, with milliseconds."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def spend_view(credit_count: int, cost_micros: int) -> Spend:
    return Spend(credits=credit_count, cost=cost_micros / MICROS)


def fetch_view(task: Task, now: float) -> OpenFetchResponse:
    started_at = task.started_at or task.updated_at
    return OpenFetchResponse(
        task_id=task.task_id,
        index=task.index,
        url=task.url,
        attempts=task.attempts,
        started_at=instant(started_at),
        age_s=round(max(0.0, now - started_at), 3),
    )


def bucket_view(bucket: Bucket) -> SeriesBucket:
    return SeriesBucket(
        since=instant(bucket.since),
        until=instant(bucket.until),
        successful=bucket.successful,
        failed=bucket.failed,
        failure_reasons=bucket.reasons,
        bytes=bucket.stored_bytes,
        spend=spend_view(bucket.credits, bucket.cost_micros),
    )


def run_view(overview: RunOverview) -> RunResponse:
    """Returns the response for a run.

    The tasks in flight come from leases, which can still exist after their task settled, so they
    are clamped to the tasks that are left. The counters may be newer than the run row and include
    a list that the row does not.
    """
    run, totals, progress = overview.run, overview.totals, overview.progress
    is_terminal = run.status in RUN_TERMINAL
    total = max(run.planned, totals.admitted)
    left = total - totals.done
    # An ended run retries no task.
    retrying = 0 if is_terminal else min(max(0, totals.retrying), left)
    rate_per_s = progress.rate_per_s
    busy = 0 if is_terminal else min(max(0, progress.inflight), left - retrying)
    stats = RunStats(
        total=total,
        completed=totals.done,
        successful=totals.successful,
        failed=totals.failed,
        inflight=busy,
        retrying=retrying,
        pending=left - retrying - busy,
        spend=spend_view(totals.credits, totals.cost_micros),
        failure_reasons=totals.reasons,
        stored_bytes=totals.stored_bytes,
    )
    return RunResponse(
        run_id=run.run_id,
        job_id=run.job_id,
        run_sequence=run.sequence,
        status=displayed_status(run, totals),
        terminal=is_terminal,
        trigger="manual" if run.scheduled_for is None else "scheduled",
        stats=stats,
        last_batch_received=run.last_batch_received,
        created_at=instant(run.created_at),
        updated_at=instant(run.updated_at),
        pause_state=run.pause_state if run.pause_state is PauseState.PAUSED else None,
        ingest_status=run.ingest_status,
        stop_reason=run.stop_reason,
        failure_reason=run.failure_reason,
        failure_detail=run.failure_detail,
        waiting_on=None if progress.waiting_on is None else waiting_view(progress.waiting_on),
        eta_seconds=None if progress.eta_s is None else math.ceil(progress.eta_s),
        scheduled_for=None if run.scheduled_for is None else instant(run.scheduled_for),
        results_expire_at=None if run.expires_at is None else instant(run.expires_at),
        budget=budget_view(overview.budget),
        rate_per_s=None if rate_per_s is None or is_terminal else round(rate_per_s, 2),
    )


def waiting_view(waiting: Waiting) -> WaitingResponse:
    since = None if waiting.since is None else instant(waiting.since)
    return WaitingResponse(reason=waiting.reason, detail=waiting.detail, since=since)


def job_view(job: Job, latest_run: RunResponse | None) -> JobResponse:
    params = dict(job.params)
    if job.headers_sealed is not None:
        params["custom_headers"] = HIDDEN
    return JobResponse(
        job_id=job.job_id,
        type=job.type,
        status=job.status,
        format=job.format,
        created_at=instant(job.created_at),
        updated_at=instant(job.updated_at),
        max_inflight=job.max_inflight,
        max_attempts=job.max_attempts,
        priority=job.priority,
        result_ttl_days=job.result_ttl_days,
        zenrows_params=params,
        external_id=job.external_id,
        name=job.name,
        metadata=job.metadata,
        webhook=webhook_view(job.webhook),
        latest_run=latest_run,
        budget=cap_view(job.budget),
        host_limits=host_limits_view(job.host_limits),
        dedup=job.dedup,
    )


def scheduled_view(view: JobResponse, schedule: Schedule, now: float) -> JobResponse:
    """Adds the schedule and the next nominal times to a job."""
    times = [instant(at) for at in upcoming_times(schedule, now)]
    return msgspec.structs.replace(
        view,
        updated_at=max(view.updated_at, instant(schedule.updated_at)),
        schedule=schedule_view(schedule),
        schedule_state=schedule.status,
        next_scheduled_run=times[0] if times else None,
        next_scheduled_runs=times,
        skipped_fires=[_skip_view(skip) for skip in schedule.skips],
    )


def _skip_view(skip: Skip) -> SkippedFires:
    return SkippedFires(
        first_at=instant(skip.first_at), until=instant(skip.until), reason=skip.reason
    )


def webhook_view(webhook: Webhook | None) -> WebhookResponse | None:
    return None if webhook is None else WebhookResponse(webhook.url, webhook.signature)


def result_view(job: Job, task: Task, result_url: str | None, *, is_expired: bool) -> TaskResult:
    """Returns the response for a task. `result_url` is shown only while the body is stored."""
    is_successful = task.status is TaskStatus.SUCCESSFUL
    is_processing = task.status is TaskStatus.PROCESSING
    return TaskResult(
        task_id=task.task_id,
        run_id=task.run_id,
        index=task.index,
        url=task.url,
        status=ResultStatus.EXPIRED if is_expired else ResultStatus(task.status),
        result_url=result_url if is_successful and not is_expired else None,
        created_at=instant(task.created_at),
        updated_at=instant(task.updated_at),
        type=job.format if is_successful else None,
        method=task.method if task.method is Method.POST else None,
        external_id=task.external_id,
        metadata=task.metadata,
        error=task.problem if task.status is TaskStatus.FAILED else None,
        source_run_id=task.source_run_id,
        duplicate_of=task.duplicate_of,
        spend=_task_spend(task),
        reason=task.reason,
        attempts=task.attempts,
        started_at=instant(task.started_at) if is_processing and task.started_at else None,
        http_status=task.result.http_status if task.result else None,
        size_bytes=task.result.size_bytes if task.result else None,
    )


def _task_spend(task: Task) -> TaskSpend | None:
    if not task.history:
        return None
    last = task.history[-1]
    return TaskSpend(
        total=spend_view(task.credits, task.cost_micros),
        last_attempt=spend_view(last.credits, last.cost_micros),
    )


def event_view(event: Event) -> EventResponse:
    return EventResponse(
        id=str(event.seq),
        type=event.event_type,
        occurred_at=instant(event.occurred_at),
        data=msgspec.json.decode(event.data),
    )


def export_view(export: Export, download_url: str) -> ExportResponse:
    """Returns the response for an export. Only a completed one has a link and a manifest."""
    is_there = export.status in {ExportStatus.COMPLETED, ExportStatus.DELIVERING}
    has_error = export.status in {ExportStatus.FAILED, ExportStatus.DELIVERING}
    return ExportResponse(
        export_id=export.export_id,
        status=export.status,
        format=export.format,
        order=export.order,
        destination=export.destination,
        created_at=instant(export.created_at),
        expires_at=instant(export.expires_at),
        total=export.total,
        done=export.done,
        error=export.error if has_error else None,
        download_url=download_url if is_there else None,
        file_name=export_file_name(export) if is_there else None,
        size_bytes=export.size_bytes if is_there else None,
        sha256=export.sha256,
        manifest=export.manifest,
    )


def export_file_name(export: Export) -> str:
    return f"{export.run_id}.{ENCODERS[export.format].suffix}"


def history_view(task: Task) -> TaskHistoryResponse:
    return TaskHistoryResponse([_event_view(attempt) for attempt in task.history])


def _event_view(attempt: Attempt) -> TaskHistoryEvent:
    return TaskHistoryEvent(
        attempt=attempt.number,
        started_at=instant(attempt.started_at),
        ended_at=instant(attempt.ended_at),
        spend=spend_view(attempt.credits, attempt.cost_micros),
        error=attempt.problem,
    )


def cap_view(cap: BudgetCap | None) -> BudgetInput | None:
    if cap is None:
        return None
    if cap.unit is Unit.CREDITS:
        return BudgetInput(credits=cap.amount)
    return BudgetInput(cost=f"{cap.amount // MICROS}.{cap.amount % MICROS:06d}")


def budget_view(budget: Budget | None) -> BudgetResponse | None:
    if budget is None:
        return None
    if budget.unit is Unit.CREDITS:
        return BudgetResponse(left=budget.left, credits=budget.cap)
    return BudgetResponse(left=budget.left / MICROS, cost=budget.cap / MICROS)


def host_limits_view(host_limits: HostLimits | None) -> HostLimitsInput | None:
    if host_limits is None:
        return None
    hosts = {
        name: HostLimitInput(concurrency=limit.concurrency, rate_per_s=limit.rate_per_s)
        for name, limit in host_limits.hosts.items()
    }
    default = host_limits.every
    return HostLimitsInput(
        concurrency=default.concurrency, rate_per_s=default.rate_per_s, hosts=hosts
    )


def keys_view(keys: SigningKeys | None) -> HmacKeyList:
    if keys is None:
        return HmacKeyList()
    candidate = None if keys.candidate is None else _meta(keys.candidate)
    return HmacKeyList(_meta(keys.active), candidate)


def created_view(key: SigningKey, secret: bytes) -> HmacKeyCreated:
    return HmacKeyCreated(key.kid, b64encode(secret).decode(), instant(key.created_at))


def finalized_view(key: SigningKey) -> HmacKeyFinalized:
    return HmacKeyFinalized(key.kid, instant(key.created_at))


def delivery_view(notice: Notice) -> DeliveryResponse:
    is_waiting = notice.status in NOTICE_WAITING
    return DeliveryResponse(
        event_id=notice.notice_id,
        event_type=notice.event_type,
        run_id=notice.run_id,
        status=notice.status,
        occurred_at=instant(notice.occurred_at),
        attempts=notice.attempts,
        tries=[_try_view(attempt) for attempt in notice.tries],
        next_try_at=instant(notice.due_at) if is_waiting else None,
        last_error=notice.last_error,
        channel=notice.channel,
    )


def milliseconds(duration_s: float) -> int:
    return round(duration_s * 1000)


def _meta(key: SigningKey) -> HmacKeyMeta:
    return HmacKeyMeta(key.kid, instant(key.created_at))


def _try_view(attempt: DeliveryAttempt) -> DeliveryTry:
    return DeliveryTry(
        at=instant(attempt.at),
        elapsed_ms=milliseconds(attempt.duration_s),
        status_code=attempt.status,
        error=attempt.error,
    )
