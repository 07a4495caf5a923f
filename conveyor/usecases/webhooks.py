"""Webhooks of jobs: check one, try one out, set, remove, and the log of deliveries
(docs/api.md, Webhooks)."""

from __future__ import annotations

from functools import partial

import msgspec
import trio

from conveyor.domain import deliveries, paging
from conveyor.domain.changes import Applied, Change, Guard, JobKey, NoticeKey, Update
from conveyor.domain.errors import InvalidArgument, NotFound
from conveyor.domain.ids import CallerId, JobId, NoticeId, RunId, minted_at
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import Job, Notice, NoticeChannel, Webhook
from conveyor.domain.payloads import try_out_payload
from conveyor.domain.queries import NoticesOf
from conveyor.ports.notifier import Delivered, Message, NotDelivered, Notifier
from conveyor.usecases import hmac_keys
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import own_job
from conveyor.usecases.optimistic import AGAIN, Again, retry_or_refuse
from conveyor.usecases.results import owner_scope

_PAGE = 100


class Tested(msgspec.Struct, frozen=True):
    """How a receiver took a synthetic event."""

    event_id: str
    outcome: Delivered | NotDelivered
    duration_s: float


class DeliveryPage(msgspec.Struct, frozen=True):
    notices: list[Notice]
    next_cursor: str | None


async def check(
    env: Env, notifier: Notifier, caller: CallerId, webhook: Webhook, *, pointer: str = ""
) -> None:
    """Refuses a webhook that cannot work: no key to sign with, or a name that leads nowhere.
    `pointer` leads to where it stands in the request."""
    if webhook.signature and await hmac_keys.keys_of(env, caller) is None:
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
        # An Idempotency-Key must not be bound to a moment's trouble with the resolver.
        refusal.retry_after_s = 5.0 if unresolved.is_temporary else None
        raise refusal


async def check_for_new_job(
    env: Env, notifier: Notifier, caller: CallerId, webhook: Webhook, job_id: JobId
) -> None:
    """A repeated submit finishes the job that the first began: that one was checked."""
    if await env.store.read(JobKey(job_id)) is None:
        await check(env, notifier, caller, webhook, pointer="/webhook")


async def try_out(
    env: Env, notifier: Notifier, caller: CallerId, webhook: Webhook, *, event_id: str
) -> Tested:
    """Sends one event that tells of nothing, signed as real ones are. Made again after a crash, it
    is the same event to the byte."""
    await check(env, notifier, caller, webhook)
    secrets = await hmac_keys.open_secrets(env, caller) if webhook.signature else ()
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


async def get(env: Env, caller: CallerId, job_id: str) -> Webhook:
    job = await own_job(env, caller, job_id)
    if job.webhook is None:
        raise NotFound("The job has no webhook.")
    return job.webhook


async def replace(
    env: Env, notifier: Notifier, caller: CallerId, job_id: str, webhook: Webhook
) -> None:
    """Holds for every delivery that has not been made yet."""
    job = await own_job(env, caller, job_id)
    await check(env, notifier, caller, webhook)
    await _set(env, job.job_id, webhook)


async def remove(env: Env, caller: CallerId, job_id: str) -> None:
    """Drops what has not been delivered; what is left of it is dropped when it comes due."""
    job = await own_job(env, caller, job_id)
    await _set(env, job.job_id, None)
    query = NoticesOf(job_id=job.job_id, limit=_PAGE)
    while page := await env.store.find(query):
        waiting = [notice for notice in page if _waits_for_webhook(notice)]
        await env.store.commit([deliveries.drop(notice) for notice in waiting])
        query = msgspec.structs.replace(query, before=_place(page[-1]))


async def page(
    env: Env, caller: CallerId, job_id: str, *, cursor: str | None, limit: int
) -> DeliveryPage:
    """The job's events with their tries, newest run first."""
    job = await own_job(env, caller, job_id)
    scope = owner_scope(caller, f"deliveries|{job.job_id}")
    sign = partial(env.vault.sign, purpose="cursor")
    before = None
    if cursor is not None:
        before = _read_place(paging.read_cursor(cursor, scope=scope, sign=sign))
    rows = await env.store.find(NoticesOf(job_id=job.job_id, before=before, limit=limit + 1))
    if len(rows) <= limit:
        return DeliveryPage(rows, None)
    position = " ".join(map(str, _place(rows[limit - 1])))
    return DeliveryPage(rows[:limit], paging.make_cursor(position, scope=scope, sign=sign))


async def redeliver(env: Env, caller: CallerId, job_id: str, event_id: str) -> Notice:
    """Makes an event due again, whatever became of it: the same id and the same bytes."""
    job = await own_job(env, caller, job_id)
    return await retry_or_refuse("The event is", partial(_try_redeliver, env, job, event_id))


async def _try_redeliver(env: Env, job: Job, event_id: str) -> Notice | Again:
    notice = await env.store.read(NoticeKey(NoticeId(event_id)))
    if notice is None or notice.job_id != job.job_id:
        raise NotFound("There is no such event.")
    if notice.channel is NoticeChannel.WEBHOOK and job.webhook is None:
        raise NotFound("The job has no webhook.")
    verdict = await env.commit(deliveries.redeliver(notice, now=env.now()))
    if not isinstance(verdict, Applied):
        return AGAIN
    (changed,) = verdict.rows
    assert isinstance(changed, Notice)
    return changed


async def _set(env: Env, job_id: JobId, webhook: Webhook | None) -> None:
    values = {"webhook": webhook, "updated_at": env.now()}
    verdict = await env.commit(
        Change((Update(JobKey(job_id), Guard(status_in=JOB_VISIBLE), values),))
    )
    if not isinstance(verdict, Applied):
        raise NotFound("There is no such job.")


def _waits_for_webhook(notice: Notice) -> bool:
    return notice.channel is NoticeChannel.WEBHOOK and notice.status in deliveries.WAITING


def _place(notice: Notice) -> tuple[RunId, float, NoticeId]:
    return notice.run_id, notice.occurred_at, notice.notice_id


def _read_place(text: str) -> tuple[RunId, float, NoticeId]:
    run_id, at, notice_id = text.split(" ")
    return RunId(run_id), float(at), NoticeId(notice_id)
