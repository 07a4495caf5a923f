"""Webhook delivery: delivers one event from the outbox and records the attempt (SPEC.md 4.16).

An attempt is claimed before and recorded after, both guarded by the claim number. Each attempt of
an event has the same id and bytes, so a repeated delivery is recognizable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec
import trio

from conveyor.domain.changes import Applied, Change, JobKey, NoticeKey
from conveyor.domain.event import EventType
from conveyor.domain.ids import CallerId
from conveyor.domain.model import Job, Notice, NoticeChannel, Webhook
from conveyor.domain.queries import DueNotices, NoticesOf
from conveyor.domain.webhook import delivery
from conveyor.domain.webhook.keys import DeliveryAttempt
from conveyor.domain.webhook.signature import Secret
from conveyor.ports.secret_box import CannotUnseal
from conveyor.ports.webhook_sender import Callback, Delivered, Message, NotDelivered, WebhookSender
from conveyor.usecases import webhook as hmac_keys
from conveyor.usecases.context import Context
from conveyor.usecases.submit import staging

# Enough to find the events before this one; a run has only a few.
_EVENTS_OF_A_RUN_MAX = 100
# How long an event waits behind an earlier event of its run: until that one is due, at least the
# first value, at most the second. The bound keeps the order check from lagging far behind a retry.
_TURN_S, _TURN_S_MAX = 1.0, 10.0


class TaskToken(msgspec.Struct, frozen=True):
    """Identifies the task of a state machine; sealed until it is used."""

    sealed: str


class DueDelivery(msgspec.Struct, frozen=True):
    """A due event, and its current receiver."""

    notice: Notice
    to: Webhook | TaskToken
    job: Job

    @property
    def receiver(self) -> str:
        """The key by which events of one caller share a limit."""
        # Each task token has one job, so callbacks of different jobs never share a limit.
        return self.to.url if isinstance(self.to, Webhook) else self.job.job_id


class DeferredDelivery(msgspec.Struct, frozen=True):
    """An event that waits until `until`, for room or for its receiver."""

    notice: Notice
    until: float
    is_deferred: bool


class DeliveryOutcome(msgspec.Struct, frozen=True):
    """The result of an attempt, for the limiter of the receiver."""

    is_delivered: bool
    duration_s: float


async def due(env: Context, *, limit: int) -> list[Notice]:
    query = DueNotices(statuses=delivery.WAITING, due_by=env.now(), limit=limit)
    return await env.store.find(query)


async def prepare(env: Context, notice: Notice) -> DueDelivery | None:
    """Reads the job again, so that a change or removal of its webhook applies at once. Returns None
    and drops the event if it has no receiver any more."""
    job = await env.store.read(JobKey(notice.job_id))
    to = None if job is None else _receiver_of(job, notice.channel)
    if job is None or to is None:
        await env.commit(delivery.discard(notice))
        return None
    return DueDelivery(notice, to, job)


def _receiver_of(job: Job, channel: NoticeChannel) -> Webhook | TaskToken | None:
    match channel:
        case NoticeChannel.WEBHOOK:
            return job.webhook
        case NoticeChannel.STEP_FUNCTIONS:
            sealed = job.task_token_sealed
            return None if sealed is None else TaskToken(sealed)
        case _:
            assert_never(channel)


async def deliver(
    env: Context, notifier: WebhookSender, ready: DueDelivery
) -> DeliveryOutcome | None:
    """Makes one attempt and records it. If it is interrupted in between, another attempt follows.
    Returns None if another notifier makes the attempt, or if an earlier event of the run must come
    first."""
    # Before the claim, which would make the event due again only after WEBHOOK_CLAIM_S.
    if not await _has_its_turn(env, ready.notice):
        return None
    verdict = await env.commit(delivery.claim(ready.notice, now=env.now()))
    if not isinstance(verdict, Applied):
        return None
    (claimed,) = verdict.rows
    assert isinstance(claimed, Notice)
    # The wall clock for the log, Trio's clock for the duration: the wall clock may be set
    # meanwhile.
    at, begun = env.now(), trio.current_time()
    if isinstance(ready.to, Webhook):
        outcome = await _post(env, notifier, ready.notice, ready.to, ready.job.caller)
    else:
        outcome = await _call_back(env, ready.notice, ready.to, ready.job)
    duration_s = trio.current_time() - begun
    await env.commit(_recorded(env, claimed, outcome, at, duration_s))
    return DeliveryOutcome(isinstance(outcome, Delivered), duration_s)


async def fail_crashed(env: Context, notice: Notice) -> None:
    """Records a failed attempt after a crash of the delivery. Further attempts follow until the
    event's time is up."""
    row = await env.store.read(NoticeKey(notice.notice_id))
    if row is None or row.status not in delivery.WAITING:
        return
    now = env.now()
    tried = DeliveryAttempt(now, 0.0, None, "worker_crashed")
    await env.commit(delivery.failed(row, tried, retry_after_s=None, now=now, random=env.random))


async def postpone(env: Context, postponed: Sequence[DeferredDelivery]) -> None:
    """Defers events in one commit, without an attempt."""
    if not postponed:
        return
    now = env.now()
    await env.store.commit(
        [
            delivery.defer_for_receiver(each.notice, until=each.until, now=now)
            if each.is_deferred
            else delivery.postpone(each.notice, until=each.until)
            for each in postponed
        ]
    )


async def _has_its_turn(env: Context, notice: Notice) -> bool:
    query = NoticesOf(job_id=notice.job_id, run_id=notice.run_id, limit=_EVENTS_OF_A_RUN_MAX)
    first = delivery.blocking_predecessor(notice, await env.store.find(query))
    if first is None:
        return True
    until = min(max(first.due_at, env.now() + _TURN_S), env.now() + _TURN_S_MAX)
    await env.commit(delivery.postpone(notice, until=until))
    return False


async def _post(
    env: Context, notifier: WebhookSender, notice: Notice, webhook: Webhook, caller: CallerId
) -> Delivered | NotDelivered:
    secrets: tuple[Secret, ...] = ()
    if webhook.signature:
        try:
            secrets = await hmac_keys.open_secrets(env, caller)
        except CannotUnseal:
            secrets = ()
        # The receiver expects a signature, so the event waits for its key instead of being sent
        # unsigned.
        if not secrets:
            return NotDelivered("signing_key_unavailable")
    message = Message(
        event_id=notice.notice_id,
        payload=notice.payload,
        webhook=webhook,
        partition=caller,
        secrets=secrets,
    )
    return await notifier.deliver(message)


async def _call_back(
    env: Context, notice: Notice, to: TaskToken, job: Job
) -> Delivered | NotDelivered:
    if env.workflows is None:  # The job was submitted on another engine.
        return NotDelivered("step_functions_unavailable")
    try:
        token = staging.unseal_secrets(env, job, "task_token", to.sealed).body
    except CannotUnseal:
        token = None
    if token is None:
        return NotDelivered("task_token_unavailable")
    callback = Callback(
        token=token.decode(),
        is_success=notice.event_type == EventType.RUN_COMPLETED,
        event_type=notice.event_type,
        payload=notice.payload,
    )
    return await env.workflows.call_back(callback)


def _recorded(
    env: Context, notice: Notice, outcome: Delivered | NotDelivered, at: float, duration_s: float
) -> Change:
    if isinstance(outcome, Delivered):
        return delivery.delivered(notice, DeliveryAttempt(at, duration_s, outcome.status))
    tried = DeliveryAttempt(at, duration_s, outcome.status, outcome.error)
    if outcome.gone:
        return delivery.receiver_gone(notice, tried)
    return delivery.failed(
        notice, tried, retry_after_s=outcome.retry_after_s, now=env.now(), random=env.random
    )
