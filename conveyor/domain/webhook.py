"""Webhooks: the changes of a notice while it is delivered, its payload, its signatures, and the
changes of a caller's signing keys (SPEC.md 4.16; docs/api.md, Webhooks)."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from conveyor.domain import lifecycle, limits, timing
from conveyor.domain.changes import Change, Guard, Insert, NoticeKey, SigningKeysKey, Update
from conveyor.domain.ids import CallerId, Random, notice_id
from conveyor.domain.lifecycle import NOTICE, NoticeEvent
from conveyor.domain.model import (
    DeliveryAttempt,
    Job,
    Notice,
    NoticeChannel,
    Run,
    RunStatus,
    SigningKey,
    SigningKeys,
    Totals,
)

RETRY_SCHEDULE_S: Sequence[float] = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)
RETRY_AFTER_S_MAX = 24 * 3600.0
WAITING = lifecycle.NOTICE_WAITING
# The longest deferral of a notice without an attempt: until a failing receiver is called again.
POSTPONE_S_MAX = 900.0
# A due notice that waited longer than this was not attempted because the notifier was down or its
# clock was set ahead. The shortest clock step that SPEC.md 4.22 names, an hour, is longer; the
# periods of the notifier are shorter.
_LATE_S_MAX = 1800.0
_MAY_ASK_FOR_TIME = frozenset({429, 503})
_NOBODY = {NoticeChannel.WEBHOOK: "no_webhook", NoticeChannel.STEP_FUNCTIONS: "no_task_token"}


# Deliveries: a notice is claimed for an attempt, then delivered, deferred, exhausted or
# redelivered. Every change is guarded by the number of the claim.


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
    ttl_s = POSTPONE_S_MAX
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


# Payloads: the bytes of a notice, made once and sent with every attempt.


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


# Signatures: the contract's header and those of Standard Webhooks. Both contain the second of the
# attempt, because receivers refuse old signatures. The id and the body are the same for every
# attempt.

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secret:
    """A decrypted HMAC key. Its repr does not contain its bytes."""

    kid: str
    key: bytes = field(repr=False)


def signature_headers(
    event_id: str, body: bytes, secrets: Sequence[Secret], *, now: float
) -> list[tuple[str, str]]:
    """Returns the headers that identify and sign one attempt. The first secret is the active one.

    A receiver of the contract reads one `kid` from one header. The signature of a candidate has its
    own header, because receivers differ in how they read a repeated header.
    """
    at = str(int(now))
    headers = [("webhook-id", event_id), ("webhook-timestamp", at)]
    if not secrets:
        return headers
    standard = [_standard(secret, event_id, at, body) for secret in secrets]
    headers.append(("webhook-signature", " ".join(standard)))
    names = ("X-Signature", "X-Signature-Candidate")
    return headers + [
        (name, f"t={at},v1={_digest(secret, f'{at}.', body).hex()},kid={secret.kid}")
        for name, secret in zip(names, secrets, strict=False)
    ]


def _standard(secret: Secret, event_id: str, at: str, body: bytes) -> str:
    return "v1," + b64encode(_digest(secret, f"{event_id}.{at}.", body)).decode()


def _digest(secret: Secret, before: str, body: bytes) -> bytes:
    return hmac.digest(secret.key, before.encode() + body, hashlib.sha256)


# Signing keys: create the first, add a candidate, promote or drop it. Each caller has one row. Its
# version guards every change, so that one of two concurrent changes is refused.


def make_first_key(caller: CallerId, key: SigningKey) -> Change:
    return Change((Insert(SigningKeysKey(caller), SigningKeys(caller, key)),))


def add_candidate(keys: SigningKeys, key: SigningKey) -> Change:
    """Adds a candidate. It signs in addition to the active key until it is promoted or dropped."""
    return _change_keys(keys, candidate=key)


def promote_candidate(keys: SigningKeys) -> Change:
    assert keys.candidate is not None
    return _change_keys(keys, active=keys.candidate, candidate=None)


def drop_candidate(keys: SigningKeys) -> Change:
    return _change_keys(keys, candidate=None)


def keys_in_use(keys: SigningKeys) -> tuple[SigningKey, ...]:
    """The keys that sign a delivery, the active one first."""
    return (keys.active,) if keys.candidate is None else (keys.active, keys.candidate)


def _change_keys(keys: SigningKeys, **values: Any) -> Change:
    guard = Guard(equals=(("version", keys.version),))
    return Change((Update(SigningKeysKey(keys.caller), guard, values, {"version": 1}),))
