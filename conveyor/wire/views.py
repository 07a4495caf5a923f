"""Views: rows of the domain as responses. Pure; secrets never come through here (SPEC 4)."""

from __future__ import annotations

from datetime import UTC, datetime

from conveyor.domain.export import Export, ExportStatus
from conveyor.domain.formats import ENCODERS
from conveyor.domain.lifecycle import RUN_TERMINAL, seen_status
from conveyor.domain.model import (
    Attempt,
    Job,
    Method,
    PauseState,
    Run,
    Task,
    TaskStatus,
    Totals,
    Webhook,
)
from conveyor.wire.responses import (
    ExportResponse,
    JobResponse,
    ResultStatus,
    RunResponse,
    RunStats,
    Spend,
    TaskHistoryEvent,
    TaskHistoryResponse,
    TaskResult,
    WebhookResponse,
)

HIDDEN = "***"

_MICROS = 1_000_000


def instant(at: float) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def spend_view(credit_count: int, cost_micros: int) -> Spend:
    return Spend(credits=credit_count, cost=cost_micros / _MICROS)


def run_view(run: Run, totals: Totals, inflight: int) -> RunResponse:
    """`inflight` may come from leases that overlap a settle: it is clamped to what is left."""
    is_terminal = run.status in RUN_TERMINAL
    left = max(0, run.planned - totals.done)
    busy = 0 if is_terminal else min(max(0, inflight), left)
    stats = RunStats(
        total=run.planned,
        completed=totals.done,
        successful=totals.successful,
        failed=totals.failed,
        inflight=busy,
        pending=left - busy,
        spend=spend_view(totals.credits, totals.cost_micros),
        failure_reasons=totals.reasons,
    )
    return RunResponse(
        run_id=run.run_id,
        job_id=run.job_id,
        run_sequence=run.sequence,
        status=seen_status(run, totals),
        terminal=is_terminal,
        trigger="manual",
        stats=stats,
        last_batch_received=run.last_batch_received,
        created_at=instant(run.created_at),
        updated_at=instant(run.updated_at),
        pause_state=run.pause_state if run.pause_state is PauseState.PAUSED else None,
        ingest_status=run.ingest_status,
        stop_reason=run.stop_reason,
        failure_reason=run.failure_reason,
        failure_detail=run.failure_detail,
        results_expire_at=None if run.expires_at is None else instant(run.expires_at),
    )


def job_view(job: Job, latest_run: RunResponse | None) -> JobResponse:
    params = dict(job.params)
    if job.headers_sealed is not None:
        params["custom_headers"] = HIDDEN
    return JobResponse(
        job_id=job.job_id,
        type="regular",
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
    )


def webhook_view(webhook: Webhook | None) -> WebhookResponse | None:
    return None if webhook is None else WebhookResponse(webhook.url, webhook.signature)


def result_view(job: Job, task: Task, result_url: str | None, *, is_expired: bool) -> TaskResult:
    """`result_url` is where the body is; it is shown while there is one."""
    is_successful = task.status is TaskStatus.SUCCESSFUL
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
    )


def export_view(export: Export, download_url: str) -> ExportResponse:
    """The link and the manifest are told once the file is there."""
    is_there = export.status is ExportStatus.COMPLETED
    return ExportResponse(
        export_id=export.export_id,
        status=export.status,
        format=export.format,
        created_at=instant(export.created_at),
        expires_at=instant(export.expires_at),
        total=export.total,
        done=export.done,
        error=export.error if export.status is ExportStatus.FAILED else None,
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
