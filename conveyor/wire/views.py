"""Views: rows of the domain as responses. Pure; secrets never come through here (SPEC 4)."""

from __future__ import annotations

from datetime import UTC, datetime

from conveyor.domain.budget import MICROS, Budget
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
from conveyor.wire.limits import budget_view, cap_view, host_limits_view
from conveyor.wire.responses import (
    JobResponse,
    RunResponse,
    RunStats,
    Spend,
    TaskHistoryEvent,
    TaskHistoryResponse,
    TaskResult,
    TaskSpend,
    WebhookResponse,
)

HIDDEN = "***"


def instant(at: float) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def spend_view(credit_count: int, cost_micros: int) -> Spend:
    return Spend(credits=credit_count, cost=cost_micros / MICROS)


def run_view(run: Run, totals: Totals, inflight: int, budget: Budget | None = None) -> RunResponse:
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
        budget=budget_view(budget),
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
        zenrows_params=params,
        external_id=job.external_id,
        name=job.name,
        metadata=job.metadata,
        webhook=webhook_view(job.webhook),
        latest_run=latest_run,
        budget=cap_view(job.budget),
        host_limits=host_limits_view(job.host_limits),
    )


def webhook_view(webhook: Webhook | None) -> WebhookResponse | None:
    return None if webhook is None else WebhookResponse(webhook.url, webhook.signature)


def result_view(job: Job, task: Task, result_url: str | None) -> TaskResult:
    """`result_url` is where the body is; it is shown on successful tasks only."""
    is_successful = task.status is TaskStatus.SUCCESSFUL
    return TaskResult(
        task_id=task.task_id,
        run_id=task.run_id,
        index=task.index,
        url=task.url,
        status=task.status,
        result_url=result_url if is_successful else None,
        created_at=instant(task.created_at),
        updated_at=instant(task.updated_at),
        type=job.format if is_successful else None,
        method=task.method if task.method is Method.POST else None,
        external_id=task.external_id,
        metadata=task.metadata,
        error=task.problem if task.status is TaskStatus.FAILED else None,
        source_run_id=task.source_run_id,
        spend=_task_spend(task),
    )


def _task_spend(task: Task) -> TaskSpend | None:
    if not task.history:
        return None
    last = task.history[-1]
    return TaskSpend(
        total=spend_view(task.credits, task.cost_micros),
        last_attempt=spend_view(last.credits, last.cost_micros),
    )


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
