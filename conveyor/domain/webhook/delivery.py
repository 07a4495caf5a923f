"""Deliveries: the payload of a notice, and its changes: claimed for an attempt, delivered,
deferred, exhausted, redelivered (SPEC.md 4.16).

Every change is guarded by the number of the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from conveyor.domain import lifecycle, limits, timing
from conveyor.domain.changes import Change, Guard, NoticeKey, Update
from conveyor.domain.ids import Random, notice_id
from conveyor.domain.lifecycle import NOTICE, NoticeEvent
from conveyor.domain.model import (
    DeliveryAttempt,
    Job,
    Notice,
    NoticeChannel,
    Run,
    RunStatus,
    Totals,
)

RETRY_SCHEDULE_S: Sequence[float] = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)
RETRY_AFTER_S_MAX = 24 * 3600.0
WAITING = lifecycle.NOTICE_WAITING
# The longest deferral of a notice without an attempt: until a failing receiver is called again.
PUT_OFF_S_MAX = 900.0
# A due notice that waited longer than this was not attempted because the notifier was down or its
# clock was set ahead. The shortest clock step that SPEC.md 4.22 names, an hour, is longer; the
# periods of the notifier are shorter.
_LATE_S_MAX = 1800.0
_MAY_ASK_FOR_TIME = frozenset({429, 503})
_NOBODY = {NoticeChannel.WEBHOOK: "no_webhook", NoticeChannel.STEP_FUNCTIONS: "no_task_token"}


def claim(notice: Notice, *, now: float) -> Change:
    """Claims a notice for one attempt. No other process attempts it until the result is recorded
    or the claim has expired.
    """
    values = {"due_at": now + limits.WEBHOOK_CLAIM_S, **_without_lateness(notice, now)}
    return _update(notice, NoticeEvent.CLAIMED, values, {"claim": 1})


def record_delivered(notice: Notice, attempt: DeliveryAttempt) -> Change:
    return _record_attempt(
        notice,
        attempt,
        NoticeEvent.DELIVERED,
        {"status": lifecycle.target(NOTICE, NoticeEvent.DELIVERED)},
    )


def record_receiver_gone(notice: Notice, attempt: DeliveryAttempt) -> Change:
    """Ends a notice whose receiver refuses it permanently."""
    return _record_attempt(
        notice,
        attempt,
        NoticeEvent.EXHAUSTED,
        {"status": lifecycle.target(NOTICE, NoticeEvent.EXHAUSTED)},
    )


def record_failed(
    notice: Notice,
    attempt: DeliveryAttempt,
    *,
    retry_after_s: float | None,
    now: float,
    random: Random,
) -> Change:
    if is_over(notice, now=now):
        return record_receiver_gone(notice, attempt)
    failures = 1 + sum(earlier.at >= notice.due_since for earlier in notice.tries)
    delay_s = next_delivery_s(failures, retry_after_s=retry_after_s, random=random)
    values = {"due_at": now + delay_s, **_without_lateness(notice, now)}
    return _record_attempt(notice, attempt, NoticeEvent.RETRIED, values)


def postpone(notice: Notice, *, until: float, now: float) -> Change:
    """Defers a notice without an attempt."""
    values = {"due_at": until, **_without_lateness(notice, now)}
    return _update(notice, NoticeEvent.POSTPONED, values)


def pull_back(notice: Notice, *, now: float) -> Change | None:
    """Makes a notice due now if it is deferred for longer than possible, and starts its delivery
    period now if that would start later: the clock was ahead."""
    failures = sum(attempt.at >= notice.due_since for attempt in notice.tries)
    is_told_to_wait = bool(notice.tries) and notice.tries[-1].status in _MAY_ASK_FOR_TIME
    ttl_s = PUT_OFF_S_MAX
    if failures:
        ttl_s = max(ttl_s, 1.1 * RETRY_SCHEDULE_S[min(failures, len(RETRY_SCHEDULE_S)) - 1])
    if is_told_to_wait:
        ttl_s = max(ttl_s, RETRY_AFTER_S_MAX)
    values: dict[str, float] = {}
    if timing.is_unreal(notice.due_at, now=now, ttl_s=ttl_s):
        values["due_at"] = now
    if timing.is_unreal(notice.due_since, now=now, ttl_s=0.0):
        values["due_since"] = now
    return _update(notice, NoticeEvent.POSTPONED, values) if values else None


def defer_for_receiver(notice: Notice, *, until: float, now: float) -> Change:
    """Defers a notice without an attempt, because other deliveries to its receiver fail.

    After the delivery period this counts as failure.
    """
    if not is_over(notice, now=now):
        return postpone(notice, until=until, now=now)
    ended = {
        "status": lifecycle.target(NOTICE, NoticeEvent.EXHAUSTED),
        "last_error": "receiver_sidelined",
    }
    return _update(notice, NoticeEvent.EXHAUSTED, ended)


def discard(notice: Notice) -> Change:
    """Drops a notice that has no receiver any more."""
    values = {
        "status": lifecycle.target(NOTICE, NoticeEvent.DROPPED),
        "last_error": _NOBODY[notice.channel],
    }
    return _update(notice, NoticeEvent.DROPPED, values)


def redeliver(notice: Notice, *, now: float) -> Change:
    """Makes a notice due again with a full delivery period. The result of a running attempt is
    ignored.
    """
    values = {
        "status": lifecycle.target(NOTICE, NoticeEvent.REDELIVERED),
        "due_at": now,
        "due_since": now,
        "last_error": None,
    }
    return _update(notice, NoticeEvent.REDELIVERED, values, {"claim": 1})


def blocking_predecessor(notice: Notice, of_its_run: Iterable[Notice]) -> Notice | None:
    """Returns the notice that must be delivered before this one, or None. Channels are
    independent."""
    before = [
        other
        for other in of_its_run
        if other.channel is notice.channel
        and other.status in WAITING
        and _place(other) < _place(notice)
    ]
    return min(before, key=_place, default=None)


def next_delivery_s(failures: int, *, retry_after_s: float | None, random: Random) -> float:
    """Seconds until the next attempt after `failures` failures, with 10 % jitter, and never less
    than the receiver's Retry-After."""
    planned = RETRY_SCHEDULE_S[min(failures, len(RETRY_SCHEDULE_S)) - 1]
    return max(planned * random.uniform(0.9, 1.1), min(retry_after_s or 0.0, RETRY_AFTER_S_MAX))


def is_over(notice: Notice, *, now: float) -> bool:
    """Whether the delivery period has passed. Time in which the notifier did not attempt the due
    notice is not part of it."""
    due_since = _without_lateness(notice, now).get("due_since", notice.due_since)
    return now - due_since > limits.WEBHOOK_GIVE_UP_S


def _without_lateness(notice: Notice, now: float) -> dict[str, float]:
    """Returns the start of the delivery period if it must be moved: by the time for which the
    notice was due and nothing was done about it."""
    late_s = now - notice.due_at
    return {"due_since": notice.due_since + late_s} if late_s > _LATE_S_MAX else {}


def _place(notice: Notice) -> tuple[float, str]:
    return notice.occurred_at, notice.notice_id


def _record_attempt(
    notice: Notice, attempt: DeliveryAttempt, event: NoticeEvent, values: dict[str, Any]
) -> Change:
    log = (*notice.tries, attempt)[-limits.WEBHOOK_TRIES_KEPT :]
    return _update(
        notice, event, {**values, "tries": log, "last_error": attempt.error}, {"attempts": 1}
    )


def _update(
    notice: Notice, event: NoticeEvent, values: dict[str, Any], deltas: dict[str, int] | None = None
) -> Change:
    guard = Guard(status_in=lifecycle.sources(NOTICE, event), equals=(("claim", notice.claim),))
    return Change((Update(NoticeKey(notice.notice_id), guard, values, deltas or {}),))


# Payloads: the bytes of a notice, made once and sent with every attempt
# (docs/api.md, Webhooks).


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
