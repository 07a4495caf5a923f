"""Webhooks of jobs: check, test, set and remove one, the log of deliveries, and the signing keys
(docs/api.md, Webhooks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import msgspec
import trio

from conveyor.domain import queries
from conveyor.domain import webhook as webhooks
from conveyor.domain.changes import (
    Applied,
    Change,
    Guard,
    JobKey,
    NoticeKey,
    SigningKeysKey,
    Update,
)
from conveyor.domain.errors import Conflict, InvalidArgument, NotFound
from conveyor.domain.ids import CallerId, JobId, NoticeId, RunId, minted_at
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import (
    DeliveryAttempt,
    EventType,
    Job,
    Notice,
    NoticeChannel,
    SigningKey,
    SigningKeys,
    Webhook,
)
from conveyor.domain.queries import DueNotices, NoticesOf
from conveyor.domain.webhook import SECRET_BYTES, Secret, try_out_payload
from conveyor.ports.secret_box import CannotUnseal
from conveyor.ports.webhook_sender import Callback, Delivered, Message, NotDelivered, WebhookSender
from conveyor.usecases.context import AGAIN, Again, Context, retry_or_refuse
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.run.results import owner_scope
from conveyor.usecases.submit import staging

# Notices per page when waiting ones are dropped.
_PAGE = 100


class Tested(msgspec.Struct, frozen=True):
    """How a receiver responded to a test event."""

    event_id: str
    outcome: Delivered | NotDelivered
    duration_s: float


class DeliveryPage(msgspec.Struct, frozen=True):
    notices: list[Notice]
    next_cursor: str | None


def make_webhook(env: Context, url: str, *, signature: bool, pointer: str = "") -> Webhook:
    """Returns a webhook whose URL the target policy allows.

    The policy applies with every gateway, because this process itself sends webhooks. `pointer` is
    the JSON pointer of the webhook in the request.
    """
    why = env.config.webhooks.forbids_receiver(url)
    if why is not None:
        raise InvalidArgument(
            f"The webhook must be a public https URL: {why}.",
            pointer=f"{pointer}/url",
            code="callback_url_must_be_https",
        )
    return Webhook(url, signature)


async def check(
    env: Context, notifier: WebhookSender, caller: CallerId, webhook: Webhook, *, pointer: str = ""
) -> None:
    """Refuses a webhook that cannot work: there is no key to sign with, or its host name has no
    allowed address. `pointer` is its position in the request."""
    if webhook.signature and await keys_of(env, caller) is None:
        raise InvalidArgument(
            "There is no active HMAC key to sign webhooks with: make one with "
            "POST /v1/hmac/keys/rotate.",
            pointer=f"{pointer}/signature",
            code="webhook_signing_requires_active_key",
        )
    unresolved = await notifier.resolve(webhook, caller)
    if unresolved is not None:
        refusal = InvalidArgument(
            "The webhook's host name does not lead to a public address.",
            pointer=f"{pointer}/url",
            code="callback_url_unresolvable",
        )
        # A temporary failure of the resolver must not be stored under the Idempotency-Key: a
        # refusal with `Retry-After` releases the key.
        refusal.retry_after_s = 5.0 if unresolved.is_temporary else None
        raise refusal


async def validate_new(
    env: Context, notifier: WebhookSender, caller: CallerId, webhook: Webhook, job_id: JobId
) -> None:
    """Checks the webhook of a new job. A repeated submit finishes the first job, whose webhook was
    checked."""
    if await env.store.read(JobKey(job_id)) is None:
        await check(env, notifier, caller, webhook, pointer="/webhook")


async def send_test(
    env: Context, notifier: WebhookSender, caller: CallerId, webhook: Webhook, *, event_id: str
) -> Tested:
    """Sends one test event, signed like a real one. If it is sent again after a crash, it has the
    same bytes."""
    await check(env, notifier, caller, webhook)
    secrets = await open_secrets(env, caller) if webhook.signature else ()
    # The time is taken from the id, so that a repeated request produces the same payload.
    payload = try_out_payload(event_id, minted_at(event_id))
    started_s = trio.current_time()
    outcome = await notifier.deliver(
        Message(
            event_id=event_id,
            payload=payload,
            webhook=webhook,
            partition=caller,
            secrets=secrets,
        )
    )
    return Tested(event_id, outcome, trio.current_time() - started_s)


async def get(env: Context, caller: CallerId, job_id: str) -> Webhook:
    job = await load_owned_job(env, caller, job_id)
    if job.webhook is None:
        raise NotFound("The job has no webhook.")
    return job.webhook


async def replace(
    env: Context, notifier: WebhookSender, caller: CallerId, job_id: str, webhook: Webhook
) -> None:
    """Sets the webhook. It applies to every delivery attempt from now on."""
    job = await load_owned_job(env, caller, job_id)
    await check(env, notifier, caller, webhook)
    await _set(env, job.job_id, webhook)


async def remove(env: Context, caller: CallerId, job_id: str) -> None:
    """Removes the webhook and drops its waiting events. Events that are not reached here are
    dropped when they are due."""
    job = await load_owned_job(env, caller, job_id)
    # First: from then on no delivery attempt starts, even if this process stops in the loop.
    await _set(env, job.job_id, None)
    query = NoticesOf(job_id=job.job_id, limit=_PAGE)
    while page := await env.store.find(query):
        waiting = [notice for notice in page if _waits_for_webhook(notice)]
        await env.store.commit([webhooks.discard(notice) for notice in waiting])
        query = msgspec.structs.replace(query, before=_place(page[-1]))


async def page(
    env: Context, caller: CallerId, job_id: str, *, cursor: str | None, limit: int
) -> DeliveryPage:
    """Returns a page of the job's events with their delivery attempts, newest run first."""
    job = await load_owned_job(env, caller, job_id)
    scope = owner_scope(caller, f"deliveries|{job.job_id}")
    sign = partial(env.secret_box.sign, purpose="cursor")
    before = None
    if cursor is not None:
        before = _read_place(queries.read_cursor(cursor, scope=scope, sign=sign))
    rows = await env.store.find(NoticesOf(job_id=job.job_id, before=before, limit=limit + 1))
    if len(rows) <= limit:
        return DeliveryPage(rows, None)
    position = " ".join(map(str, _place(rows[limit - 1])))
    return DeliveryPage(rows[:limit], queries.make_cursor(position, scope=scope, sign=sign))


async def redeliver(env: Context, caller: CallerId, job_id: str, event_id: str) -> Notice:
    """Makes an event due again, whatever its status, with the same id and the same bytes."""
    job = await load_owned_job(env, caller, job_id)
    return await retry_or_refuse("The event is", partial(_try_redeliver, env, job, event_id))


async def _try_redeliver(env: Context, job: Job, event_id: str) -> Notice | Again:
    notice = await env.store.read(NoticeKey(NoticeId(event_id)))
    if notice is None or notice.job_id != job.job_id:
        raise NotFound("There is no such event.")
    if notice.channel is NoticeChannel.WEBHOOK and job.webhook is None:
        raise NotFound("The job has no webhook.")
    verdict = await env.commit(webhooks.redeliver(notice, now=env.now()))
    if not isinstance(verdict, Applied):
        return AGAIN
    (changed,) = verdict.rows
    assert isinstance(changed, Notice)
    return changed


async def _set(env: Context, job_id: JobId, webhook: Webhook | None) -> None:
    values = {"webhook": webhook, "updated_at": env.now()}
    verdict = await env.commit(
        Change((Update(JobKey(job_id), Guard(status_in=JOB_VISIBLE), values),))
    )
    if not isinstance(verdict, Applied):
        raise NotFound("There is no such job.")


def _waits_for_webhook(notice: Notice) -> bool:
    return notice.channel is NoticeChannel.WEBHOOK and notice.status in webhooks.WAITING


def _place(notice: Notice) -> tuple[RunId, float, NoticeId]:
    return notice.run_id, notice.occurred_at, notice.notice_id


def _read_place(text: str) -> tuple[RunId, float, NoticeId]:
    run_id, at, notice_id = text.split(" ")
    return RunId(run_id), float(at), NoticeId(notice_id)


# HMAC keys: rotate, cancel, finalize, and unseal those that sign (docs/api.md, Webhooks).


_SUBJECT = "The keys are"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key with its secret, which is shown only once."""

    key: SigningKey
    secret: bytes = field(repr=False)


async def keys_of(env: Context, caller: CallerId) -> SigningKeys | None:
    return await env.store.read(SigningKeysKey(caller))


async def rotate(env: Context, caller: CallerId, *, kid: str) -> NewKey:
    """Creates the caller's first key, or a candidate beside the active key. A repeated call with
    the same `kid` returns the key that the first call created."""
    return await retry_or_refuse(_SUBJECT, partial(_try_rotate, env, caller, kid))


async def _try_rotate(env: Context, caller: CallerId, kid: str) -> NewKey | Again:
    keys = await keys_of(env, caller)
    existing = _find(keys, kid)
    if existing is not None:
        return NewKey(existing, _unseal(env, caller, existing).key)
    if keys is not None and keys.candidate is not None:
        raise Conflict(
            "A candidate key is waiting: finalize or cancel that rotation first.",
            code="candidate_pending",
        )
    new = _generate(env, caller, kid)
    change = (
        webhooks.make_first_key(caller, new.key)
        if keys is None
        else webhooks.add_candidate(keys, new.key)
    )
    return new if isinstance(await env.commit(change), Applied) else AGAIN


async def finalize(env: Context, caller: CallerId) -> SigningKey:
    """Makes the candidate the active key and drops the previous one."""
    return await retry_or_refuse(_SUBJECT, partial(_try_finalize, env, caller))


async def _try_finalize(env: Context, caller: CallerId) -> SigningKey | Again:
    keys = await keys_of(env, caller)
    if keys is None or keys.candidate is None:
        raise Conflict("There is no candidate key to finalize.", code="no_candidate")
    is_applied = isinstance(await env.commit(webhooks.promote_candidate(keys)), Applied)
    return keys.candidate if is_applied else AGAIN


async def cancel(env: Context, caller: CallerId) -> None:
    """Drops the candidate; without one nothing changes."""
    await retry_or_refuse(_SUBJECT, partial(_try_cancel, env, caller))


async def _try_cancel(env: Context, caller: CallerId) -> Again | None:
    keys = await keys_of(env, caller)
    if keys is None or keys.candidate is None:
        return None
    return None if isinstance(await env.commit(webhooks.drop_candidate(keys)), Applied) else AGAIN


async def open_secrets(env: Context, caller: CallerId) -> tuple[Secret, ...]:
    """Returns the secrets that sign a delivery, the active key first. Raises CannotUnseal."""
    keys = await keys_of(env, caller)
    return tuple(_unseal(env, caller, key) for key in webhooks.keys_in_use(keys)) if keys else ()


def _find(keys: SigningKeys | None, kid: str) -> SigningKey | None:
    held = webhooks.keys_in_use(keys) if keys is not None else ()
    return next((key for key in held if key.kid == kid), None)


def _generate(env: Context, caller: CallerId, kid: str) -> NewKey:
    secret = env.random.getrandbits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "big")
    sealed = env.secret_box.seal(secret, place=_sealing_context(caller, kid))
    return NewKey(SigningKey(kid, env.now(), sealed), secret)


def _unseal(env: Context, caller: CallerId, key: SigningKey) -> Secret:
    return Secret(
        key.kid, env.secret_box.unseal(key.sealed, place=_sealing_context(caller, key.kid))
    )


def _sealing_context(caller: CallerId, kid: str) -> str:
    return f"{caller}|hmac|{kid}"


# Webhook delivery: delivers one event from the outbox and records the attempt (SPEC.md 4.16).
#
# An attempt is claimed before and recorded after, both guarded by the claim number. Each attempt of
# an event has the same id and bytes, so a repeated delivery is recognizable.


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
    """The result of an attempt, for the limiter of the receiver and the log. `error` is None if the
    event was delivered."""

    is_delivered: bool
    duration_s: float
    error: str | None = None


async def due(env: Context, *, limit: int) -> list[Notice]:
    query = DueNotices(statuses=webhooks.WAITING, due_by=env.now(), limit=limit)
    return await env.store.find(query)


async def prepare(env: Context, notice: Notice) -> DueDelivery | None:
    """Reads the job again, so that a change or removal of its webhook applies at once. Returns None
    and drops the event if it has no receiver any more."""
    job = await env.store.read(JobKey(notice.job_id))
    to = None if job is None else _receiver_of(job, notice.channel)
    if job is None or to is None:
        await env.commit(webhooks.discard(notice))
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
    verdict = await env.commit(webhooks.claim(ready.notice, now=env.now()))
    if not isinstance(verdict, Applied):
        return None
    (claimed,) = verdict.rows
    assert isinstance(claimed, Notice)
    # The wall clock for the log, Trio's clock for the duration: the wall clock may be set
    # meanwhile.
    at, started_s = env.now(), trio.current_time()
    if isinstance(ready.to, Webhook):
        outcome = await _post(env, notifier, ready.notice, ready.to, ready.job.caller)
    else:
        outcome = await _call_back(env, ready.notice, ready.to, ready.job)
    duration_s = trio.current_time() - started_s
    await env.commit(_record_attempt(env, claimed, outcome, at, duration_s))
    error = None if isinstance(outcome, Delivered) else outcome.error
    return DeliveryOutcome(error is None, duration_s, error)


async def fail_crashed(env: Context, notice: Notice) -> None:
    """Records a failed attempt after a crash of the delivery. Further attempts follow until the
    event's time is up."""
    row = await env.store.read(NoticeKey(notice.notice_id))
    if row is None or row.status not in webhooks.WAITING:
        return
    now = env.now()
    tried = DeliveryAttempt(now, 0.0, None, "worker_crashed")
    await env.commit(
        webhooks.record_failed(row, tried, retry_after_s=None, now=now, random=env.random)
    )


async def postpone(env: Context, postponed: Sequence[DeferredDelivery]) -> None:
    """Defers events in one commit, without an attempt."""
    if not postponed:
        return
    now = env.now()
    await env.store.commit(
        [
            webhooks.defer_for_receiver(deferred.notice, until=deferred.until, now=now)
            if deferred.is_deferred
            else webhooks.postpone(deferred.notice, until=deferred.until, now=now)
            for deferred in postponed
        ]
    )


async def _has_its_turn(env: Context, notice: Notice) -> bool:
    query = NoticesOf(job_id=notice.job_id, run_id=notice.run_id, limit=_EVENTS_OF_A_RUN_MAX)
    first = webhooks.blocking_predecessor(notice, await env.store.find(query))
    if first is None:
        return True
    now = env.now()
    until = min(max(first.due_at, now + _TURN_S), now + _TURN_S_MAX)
    await env.commit(webhooks.postpone(notice, until=until, now=now))
    return False


async def _post(
    env: Context, notifier: WebhookSender, notice: Notice, webhook: Webhook, caller: CallerId
) -> Delivered | NotDelivered:
    secrets: tuple[Secret, ...] = ()
    if webhook.signature:
        try:
            secrets = await open_secrets(env, caller)
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


def _record_attempt(
    env: Context, notice: Notice, outcome: Delivered | NotDelivered, at: float, duration_s: float
) -> Change:
    if isinstance(outcome, Delivered):
        return webhooks.record_delivered(notice, DeliveryAttempt(at, duration_s, outcome.status))
    tried = DeliveryAttempt(at, duration_s, outcome.status, outcome.error)
    if outcome.gone:
        return webhooks.record_receiver_gone(notice, tried)
    return webhooks.record_failed(
        notice, tried, retry_after_s=outcome.retry_after_s, now=env.now(), random=env.random
    )
