"""Payloads: the bytes of a notice, made once and sent with every attempt
(docs/api.md, Webhooks)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from conveyor.domain.ids import notice_id
from conveyor.domain.model import Job, Run, RunStatus
from conveyor.domain.run.counters import Totals

TEST_EVENT = "webhook.test"
_NOWHERE = "test"


def run_facts(run: Run, totals: Totals) -> dict[str, Any]:
    """Returns the facts about an ended run for webhooks and the event log."""
    stats: dict[str, Any] = {
        "total": run.planned,
        "completed": totals.done,
        "successful": totals.successful,
        "failed": totals.failed,
        "spend": {"credits": totals.credits, "cost": totals.cost_micros / 1_000_000},
    }
    if totals.reasons:
        stats["failure_reasons"] = totals.reasons
    causes = {
        "failure_reason": run.failure_reason,
        "failure_detail": run.failure_detail,
        "stop_reason": run.stop_reason,
    }
    return {"stats": stats, **causes}


def run_payload(job: Job, run: Run, totals: Totals, event_type: str, now: float) -> str:
    return _encode(
        notice_id(run.run_id, event_type),
        event_type,
        now,
        job_id=job.job_id,
        external_id=job.external_id,
        metadata=job.metadata,
        run_id=run.run_id,
        run_sequence=run.sequence,
        **run_facts(run, totals),
    )


def task_summary(run: Run, totals: Totals, status: RunStatus) -> str:
    """Returns the result of a run for the Step Functions task that waits for it."""
    return _encode_present(
        {
            "job_id": run.job_id,
            "run_id": run.run_id,
            "status": status,
            **run_facts(run, totals),
        }
    )


def try_out_payload(event_id: str, now: float) -> str:
    """Returns a test event. Receivers recognise it by its type and ids."""
    return _encode(event_id, TEST_EVENT, now, job_id=_NOWHERE, run_id=_NOWHERE, run_sequence=1)


def _encode(event_id: str, event_type: str, now: float, **fields: Any) -> str:
    event = {
        "schema": "conveyor.webhook/v1",
        "event_id": event_id,
        "event_type": event_type,
        "occurred_at": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"),
        **fields,
    }
    return _encode_present(event)


def _encode_present(fields: dict[str, Any]) -> str:
    present = {field: value for field, value in fields.items() if value is not None}
    return msgspec.json.encode(present).decode()
