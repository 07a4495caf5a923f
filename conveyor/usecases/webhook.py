"""Webhooks of jobs: check, test, set and remove one, the log of deliveries, and the signing keys
(docs/api.md, Webhooks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import msgspec
import trio

from conveyor.domain import queries
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
from conveyor.domain.model import Job, Notice, NoticeChannel, Webhook
from conveyor.domain.queries import NoticesOf
from conveyor.domain.webhook import delivery, signature
from conveyor.domain.webhook.keys import SigningKey, SigningKeys
from conveyor.domain.webhook.payload import try_out_payload
from conveyor.domain.webhook.signature import SECRET_BYTES, Secret
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, WebhookSender
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.optimistic import AGAIN, Again, retry_or_refuse
from conveyor.usecases.run.results import owner_scope

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
    begun = trio.current_time()
    outcome = await notifier.deliver(
        Message(
            event_id=event_id,
            payload=payload,
            webhook=webhook,
            partition=caller,
            secrets=secrets,
        )
    )
    return Tested(event_id, outcome, trio.current_time() - begun)


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
        await env.store.commit([delivery.discard(notice) for notice in waiting])
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
    verdict = await env.commit(delivery.redeliver(notice, now=env.now()))
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
    return notice.channel is NoticeChannel.WEBHOOK and notice.status in delivery.WAITING


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
    made = _find(keys, kid)
    if made is not None:
        return NewKey(made, _unseal(env, caller, made).key)
    if keys is not None and keys.candidate is not None:
        raise Conflict(
            "A candidate key is waiting: finalize or cancel that rotation first.",
            code="candidate_pending",
        )
    new = _generate(env, caller, kid)
    change = (
        signature.make_first(caller, new.key) if keys is None else signature.stage(keys, new.key)
    )
    return new if isinstance(await env.commit(change), Applied) else AGAIN


async def finalize(env: Context, caller: CallerId) -> SigningKey:
    """Makes the candidate the active key and drops the previous one."""
    return await retry_or_refuse(_SUBJECT, partial(_try_finalize, env, caller))


async def _try_finalize(env: Context, caller: CallerId) -> SigningKey | Again:
    keys = await keys_of(env, caller)
    if keys is None or keys.candidate is None:
        raise Conflict("There is no candidate key to finalize.", code="no_candidate")
    is_applied = isinstance(await env.commit(signature.promote(keys)), Applied)
    return keys.candidate if is_applied else AGAIN


async def cancel(env: Context, caller: CallerId) -> None:
    """Drops the candidate; without one nothing changes."""
    await retry_or_refuse(_SUBJECT, partial(_try_cancel, env, caller))


async def _try_cancel(env: Context, caller: CallerId) -> Again | None:
    keys = await keys_of(env, caller)
    if keys is None or keys.candidate is None:
        return None
    return None if isinstance(await env.commit(signature.drop(keys)), Applied) else AGAIN


async def open_secrets(env: Context, caller: CallerId) -> tuple[Secret, ...]:
    """Returns the secrets that sign a delivery, the active key first. Raises CannotUnseal."""
    keys = await keys_of(env, caller)
    return tuple(_unseal(env, caller, key) for key in signature.in_use(keys)) if keys else ()


def _find(keys: SigningKeys | None, kid: str) -> SigningKey | None:
    held = signature.in_use(keys) if keys is not None else ()
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
