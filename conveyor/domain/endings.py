"""How runs and jobs end: complete, stop, fail, delete; one guarded change each (SPEC 2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from conveyor.domain import lifecycle, limits
from conveyor.domain.changes import (
    Change,
    Guard,
    Insert,
    JobKey,
    NoticeKey,
    RunKey,
    ScrubKey,
    StatsKey,
    Update,
    Write,
)
from conveyor.domain.ids import RunId, notice_id
from conveyor.domain.lifecycle import GATE, JOB, RUN, RUN_LIVE
from conveyor.domain.model import (
    Job,
    Notice,
    NoticeStatus,
    Run,
    RunFailure,
    Scrub,
    Totals,
)
from conveyor.domain.randomness import Random

_EVENT_OF = {"completed": "run.completed", "failed": "run.failed", "stopped": "run.stopped"}
INGEST_FAILED = "ingest_failed"


def complete(job: Job, run: Run, totals: Totals, *, now: float) -> Change:
    """Every task is terminal and no more can come; the notice is part of the flip."""
    return _end(job, run, totals, "completed", {}, now)


def request_stop(run: Run, *, reason: str | None, now: float) -> Change:
    """First half of a stop: from here on nothing settles, and a crash cannot forget the rest."""
    values = {"stop_requested_at": now, "stop_reason": reason, "updated_at": now}
    guard = Guard(status_in=RUN_LIVE, equals=(("stop_requested_at", None),))
    return Change((Update(_key(run), guard, values), *_gates(run, "draining")))


def request_failure(run: Run, cause: RunFailure, detail: str, *, now: float) -> Change:
    """First half of failing a run on an account-level error."""
    values = {
        "stop_requested_at": now,
        "failure_reason": cause,
        "failure_detail": detail[:500],
        "updated_at": now,
    }
    guard = Guard(status_in=RUN_LIVE, equals=(("stop_requested_at", None),))
    return Change((Update(_key(run), guard, values), *_gates(run, "draining")))


def finish_stop(job: Job, run: Run, totals: Totals, *, now: float) -> Change:
    """Second half: the frozen counters decide. If every task had ended by then, it completed."""
    if lifecycle.is_complete(run, totals):
        no_cause = {"failure_reason": None, "failure_detail": None, "stop_reason": None}
        return _end(job, run, totals, "completed", no_cause, now)
    event = "failed" if run.failure_reason else "stopped"
    return _end(job, run, totals, event, {}, now)


def delete_run(
    job: Job, run: Run, *, next_latest: RunId | None, scrub_id: str, now: float
) -> Change:
    """The run disappears at once; its rows and bodies go when the scrub comes by."""
    values: dict[str, Any] = {"updated_at": now}
    if job.latest_run_id == run.run_id:
        values["latest_run_id"] = next_latest
    if job.active_run_id == run.run_id:
        values["active_run_id"] = None
        values |= {"status": lifecycle.target(JOB, "closed")}
    guard = Guard(
        status_in=lifecycle.sources(JOB, "deleted"),
        equals=(("latest_run_id", job.latest_run_id), ("active_run_id", job.active_run_id)),
    )
    return Change(
        (
            Update(_key(run), Guard(status_in=lifecycle.sources(RUN, "deleted")), _gone(now)),
            Update(JobKey(job.job_id), guard, values),
            *_shut_if_live(run),
            _scrub(job, run.run_id, scrub_id, now),
        )
    )


def delete_job(job: Job, active: Run | None, *, scrub_id: str, now: float) -> Change:
    """The job becomes a tombstone without customer data; the scrub does the rest."""
    tombstone: dict[str, Any] = {
        "status": lifecycle.target(JOB, "deleted"),
        "updated_at": now,
        "params": {},
        "headers_sealed": None,
        "auth_sealed": None,
        "external_id": None,
        "name": None,
        "metadata": None,
        "webhook": None,
        "active_run_id": None,
        "budget": None,
        "host_limits": None,
    }
    guard = Guard(
        status_in=lifecycle.sources(JOB, "deleted"),
        equals=(("active_run_id", job.active_run_id),),
    )
    writes: list[Write] = [Update(JobKey(job.job_id), guard, tombstone)]
    if active is not None:
        live = Guard(status_in=RUN_LIVE)
        writes += [Update(_key(active), live, _gone(now)), *_gates(active, "closed")]
    return Change((*writes, _scrub(job, None, scrub_id, now)))


def close(job: Job, run: Run, *, now: float) -> Change:
    """No more tasks will come."""
    closed = {"status": lifecycle.target(JOB, "closed"), "updated_at": now}
    return Change(
        (
            Update(JobKey(job.job_id), Guard(status_in=lifecycle.sources(JOB, "closed")), closed),
            Update(
                _key(run),
                Guard(status_in=RUN_LIVE),
                {"last_batch_received": True, "updated_at": now},
            ),
        )
    )


def close_ended(job: Job, *, now: float) -> Change:
    """Closes an open job whose run was stopped or failed before."""
    closed = {"status": lifecycle.target(JOB, "closed"), "updated_at": now}
    guard = Guard(status_in=lifecycle.sources(JOB, "closed"), equals=(("active_run_id", None),))
    return Change((Update(JobKey(job.job_id), guard, closed),))


def _key(run: Run) -> RunKey:
    return RunKey(run.job_id, run.run_id)


def _gone(now: float) -> dict[str, Any]:
    return {"status": lifecycle.target(RUN, "deleted"), "updated_at": now, "ended_at": now}


def _gates(run: Run, event: str) -> tuple[Update, ...]:
    guard = Guard(status_in=lifecycle.sources(GATE, event))
    values = {"status": lifecycle.target(GATE, event)}
    return tuple(
        Update(StatsKey(run.job_id, run.run_id, shard), guard, values)
        for shard in range(run.shard_count)
    )


def _shut_if_live(run: Run) -> tuple[Update, ...]:
    return _gates(run, "closed") if run.status in RUN_LIVE else ()


def _scrub(job: Job, run_id: RunId | None, scrub_id: str, now: float) -> Insert:
    scrub = Scrub(
        job_id=job.job_id,
        run_id=run_id,
        scrub_id=scrub_id,
        shard_count=job.shard_count,
        due_at=now,
        passes_left=2,
    )
    return Insert(ScrubKey(scrub_id), scrub)


def _end(
    job: Job, run: Run, totals: Totals, event: str, values: dict[str, Any], now: float
) -> Change:
    ended = {"status": lifecycle.target(RUN, event), "updated_at": now, "ended_at": now, **values}
    freed = {"active_run_id": None, "updated_at": now}
    owned = Guard(equals=(("active_run_id", run.run_id),))
    writes: list[Write] = [
        Update(_key(run), Guard(status_in=lifecycle.sources(RUN, event)), ended),
        Update(JobKey(job.job_id), owned, freed),
        *_gates(run, "closed"),
    ]
    if job.webhook is not None:
        final = msgspec.structs.replace(run, **values)
        writes.append(_notice(job, final, totals, _EVENT_OF[event], now))
    return Change(tuple(writes))


def _notice(job: Job, run: Run, totals: Totals, event_type: str, now: float) -> Insert:
    identity = notice_id(run.run_id, event_type)
    notice = Notice(
        notice_id=identity,
        job_id=job.job_id,
        run_id=run.run_id,
        event_type=event_type,
        status=NoticeStatus.DUE,
        occurred_at=now,
        due_at=now,
        payload=_payload(job, run, totals, event_type, now),
    )
    return Insert(NoticeKey(identity), notice)


def _payload(job: Job, run: Run, totals: Totals, event_type: str, now: float) -> str:
    stats: dict[str, Any] = {
        "total": run.planned,
        "completed": totals.done,
        "successful": totals.successful,
        "failed": totals.failed,
        "spend": {"credits": totals.credits, "cost": totals.cost_micros / 1_000_000},
    }
    if totals.reasons:
        stats["failure_reasons"] = totals.reasons
    event = {
        "schema": "conveyor.webhook/v1",
        "event_id": notice_id(run.run_id, event_type),
        "event_type": event_type,
        "occurred_at": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"),
        "job_id": job.job_id,
        "external_id": job.external_id,
        "metadata": job.metadata,
        "run_id": run.run_id,
        "run_sequence": run.sequence,
        "stats": stats,
        "failure_reason": run.failure_reason,
        "failure_detail": run.failure_detail,
        "stop_reason": run.stop_reason,
    }
    present = {field: value for field, value in event.items() if value is not None}
    return msgspec.json.encode(present).decode()


RETRY_SCHEDULE_S: Sequence[float] = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)


def next_delivery_s(attempts: int, *, retry_after_s: float | None, random: Random) -> float:
    """Seconds until a notice is tried again after `attempts` failures, a tenth more or less; but
    never sooner than the receiver asked for."""
    planned = RETRY_SCHEDULE_S[min(attempts, len(RETRY_SCHEDULE_S)) - 1]
    return max(planned * random.uniform(0.9, 1.1), min(retry_after_s or 0.0, 24 * 3600.0))


def delivery_over(notice: Notice, *, now: float) -> bool:
    return now - notice.occurred_at > limits.WEBHOOK_GIVE_UP_S
