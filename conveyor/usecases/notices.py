"""Notices: deliver one from the outbox and record what came of it (SPEC 6.6)."""

from __future__ import annotations

from conveyor.domain import endings, lifecycle
from conveyor.domain.changes import Change, Guard, JobKey, NoticeKey, Update
from conveyor.domain.lifecycle import NOTICE
from conveyor.domain.model import Notice
from conveyor.domain.queries import DueNotices
from conveyor.ports.notifier import Delivered, NotDelivered, Notifier
from conveyor.usecases.env import Env


async def due(env: Env, *, limit: int) -> list[Notice]:
    statuses = lifecycle.sources(NOTICE, "delivered")
    return await env.store.find(DueNotices(statuses=statuses, due_by=env.now(), limit=limit))


async def deliver(env: Env, notifier: Notifier, notice: Notice) -> None:
    """One try. The job's webhook is read afresh, so that a change or removal counts at once."""
    job = await env.store.read(JobKey(notice.job_id))
    if job is None or job.webhook is None:
        await env.commit(_ended(notice, "dropped", error="the job has no webhook any more"))
        return
    outcome = await notifier.deliver(notice, job.webhook)
    await env.commit(_recorded(env, notice, outcome))


def _recorded(env: Env, notice: Notice, outcome: Delivered | NotDelivered) -> Change:
    if isinstance(outcome, Delivered):
        return _ended(notice, "delivered", error=None)
    if outcome.gone or endings.delivery_over(notice, now=env.now()):
        return _ended(notice, "exhausted", error=outcome.error)
    delay_s = endings.next_delivery_s(
        notice.attempts + 1, retry_after_s=outcome.retry_after_s, random=env.random
    )
    values = {"due_at": env.now() + delay_s, "last_error": outcome.error}
    return _update(notice, "delivered", values)


def _ended(notice: Notice, event: str, *, error: str | None) -> Change:
    status = lifecycle.target(NOTICE, event)
    return _update(notice, event, {"status": status, "last_error": error})


def _update(notice: Notice, event: str, values: dict[str, object]) -> Change:
    guard = Guard(
        status_in=lifecycle.sources(NOTICE, event), equals=(("attempts", notice.attempts),)
    )
    return Change((Update(NoticeKey(notice.notice_id), guard, values, {"attempts": 1}),))
