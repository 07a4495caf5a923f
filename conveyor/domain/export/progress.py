"""The changes of an export: requested, claimed, completed, deferred, failed, removed
(SPEC.md 4.19).

`due_at` is the time when an exporter must act: at once for a new export, at the end of a claim, and
at the expiry of a finished export. The exporter that claims it fences off all others by the epoch.
"""

from __future__ import annotations

from typing import Any

from conveyor.domain import lifecycle, limits, timing
from conveyor.domain.changes import Change, Delete, ExportKey, Guard, Insert, JobKey, RunKey, Update
from conveyor.domain.export_record import (
    Export,
    ExportFormat,
    ExportOrder,
    ExportStatus,
    Manifest,
)
from conveyor.domain.ids import ExportId
from conveyor.domain.lifecycle import EXPORT, EXPORT_UNDONE, JOB_VISIBLE, RUN_ENDED, ExportEvent
from conveyor.domain.model import Run
from conveyor.domain.timing import backoff_s

# After this many failures the export fails for good. Each failure doubles the delay, from
# DEFER_S.
FAILURES_MAX = 5
DEFER_S = 5.0
DEFER_S_MAX = DEFER_S * 2**FAILURES_MAX


def export_key(export: Export) -> ExportKey:
    return ExportKey(export.job_id, export.run_id, export.export_id)


def new_export(
    run: Run,
    export_id: ExportId,
    kind: ExportFormat,
    order: ExportOrder = ExportOrder.ID,
    destination: tuple[str, str] | None = None,
    *,
    now: float,
) -> Export:
    """Makes an export. It expires after half a day, but never later than its results.
    `destination` is its description and its sealed form."""
    description, sealed = destination or (None, None)
    return Export(
        job_id=run.job_id,
        run_id=run.run_id,
        export_id=export_id,
        format=kind,
        status=ExportStatus.PENDING,
        created_at=now,
        updated_at=now,
        expires_at=min(now + limits.EXPORT_TTL_S, run.expires_at or float("inf")),
        due_at=now,
        total=run.total,
        order=order,
        destination=description,
        destination_sealed=sealed,
    )


def ask(export: Export) -> Change:
    """Stores an export, only if its job and run are visible: a deleted one must get no new rows."""
    return Change(
        (
            Update(JobKey(export.job_id), Guard(status_in=JOB_VISIBLE)),
            Update(RunKey(export.job_id, export.run_id), Guard(status_in=RUN_ENDED)),
            Insert(export_key(export), export),
        )
    )


def take_up(export: Export, *, now: float) -> Change:
    values = {
        "status": lifecycle.target(EXPORT, ExportEvent.TAKEN_UP),
        "due_at": _claim(export, now),
        "done": 0,
        "updated_at": now,
    }
    return _step(export, ExportEvent.TAKEN_UP, values, {"epoch": 1, "failures": 1})


def beat(export: Export, *, done: int, now: float) -> Change:
    """Extends the claim. It is refused after another exporter took over or the export is gone."""
    values = {"due_at": _claim(export, now), "done": done, "updated_at": now}
    return _step(export, ExportEvent.EXTENDED, values)


def publish(
    export: Export, *, key: str, size_bytes: int, sha256: str, manifest: Manifest, now: float
) -> Change:
    """Makes a complete and durable file visible. If it has a destination, its delivery is due."""
    is_over = export.destination_sealed is None
    event = ExportEvent.COMPLETED if is_over else ExportEvent.BUILT
    values = {
        "key": key,
        "size_bytes": size_bytes,
        "sha256": sha256,
        "manifest": manifest,
        "done": manifest.entries,
        "error": None,
        **_over(export, event, now),
    }
    if not is_over:
        values |= {"due_at": now, "failures": 0}
    return _step(export, event, values)


def claim_delivery(export: Export, *, now: float) -> Change:
    """Claims the delivery of the file. The new epoch fences off the process that had it."""
    values = {"due_at": _claim(export, now), "updated_at": now}
    return _step(export, ExportEvent.SENDING, values, {"epoch": 1})


def beat_delivery(export: Export, *, now: float) -> Change:
    return _step(export, ExportEvent.SENDING, {"due_at": _claim(export, now), "updated_at": now})


def defer_delivery(export: Export, error: str | None, *, delay_s: float, now: float) -> Change:
    """Makes the delivery due later. It is counted as a failure if there is an error."""
    values: dict[str, Any] = {"due_at": min(now + delay_s, export.expires_at), "updated_at": now}
    if error is not None:
        values["error"] = error
    return _step(export, ExportEvent.SENDING, values, {"failures": 1} if error else {})


def record_delivery(export: Export, *, now: float) -> Change:
    values = {"error": None, "destination_sealed": None, **_over(export, ExportEvent.SENT, now)}
    return _step(export, ExportEvent.SENT, values)


def defer(export: Export, error: str, *, now: float) -> Change:
    """Defers an export after a failed attempt."""
    delay_s = backoff_s(export.failures - 1, first_s=DEFER_S, delay_s_max=DEFER_S_MAX)
    due_at = min(now + delay_s, export.expires_at)
    values = {"due_at": due_at, "error": error, "updated_at": now}
    return _step(export, ExportEvent.DEFERRED, values)


def pull_back(export: Export, *, now: float) -> Change | None:
    """Makes an export due now if it waits longer than any claim or delay: the clock was ahead."""
    ttl_s = max(limits.EXPORT_CLAIM_S, DEFER_S_MAX)
    if export.status is ExportStatus.DELIVERING:
        ttl_s = limits.EXPORT_TTL_S  # The delays of a delivery grow up to hours.
    is_unreal = timing.is_unreal(export.due_at, now=now, ttl_s=ttl_s)
    if export.status not in EXPORT_UNDONE or not is_unreal:
        return None
    guard = Guard(status_in=EXPORT_UNDONE, equals=(("epoch", export.epoch),))
    return Change((Update(export_key(export), guard, {"due_at": now, "updated_at": now}),))


def release(export: Export, *, due_at: float, now: float) -> Change:
    """Releases an export without counting a failure: the exporter stops or the storage is down."""
    values = {"due_at": min(due_at, export.expires_at), "updated_at": now}
    return _step(export, ExportEvent.DEFERRED, values, {"failures": -1})


def give_up(export: Export, error: str | None = None, *, now: float) -> Change:
    """Fails an export for good: because of `error`, or of the error of its last attempt."""
    error = error or export.error or "the export could not be made"
    values = {
        "error": error,
        "destination_sealed": None,
        **_over(export, ExportEvent.FAILED, now),
    }
    return _step(export, ExportEvent.FAILED, values)


def remove(export: Export) -> Change:
    """Removes the row of an export whose file is removed."""
    return Change((Delete(export_key(export), Guard(equals=(("epoch", export.epoch),))),))


def failed_too_often(export: Export) -> bool:
    return export.failures >= FAILURES_MAX


def _claim(export: Export, now: float) -> float:
    return min(now + limits.EXPORT_CLAIM_S, export.expires_at)


def _over(export: Export, event: ExportEvent, now: float) -> dict[str, Any]:
    return {
        "status": lifecycle.target(EXPORT, event),
        "due_at": export.expires_at,
        "updated_at": now,
    }


def _step(
    export: Export, event: ExportEvent, values: dict[str, Any], deltas: dict[str, int] | None = None
) -> Change:
    guard = Guard(status_in=lifecycle.sources(EXPORT, event), equals=(("epoch", export.epoch),))
    return Change((Update(export_key(export), guard, values, deltas or {}),))
