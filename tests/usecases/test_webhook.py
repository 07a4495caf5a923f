"""Webhooks of jobs: what is validated, which deliveries a change affects, and how an event is
redelivered."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from conveyor.domain.changes import JobKey, NoticeKey
from conveyor.domain.errors import InvalidArgument, NotFound
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Notice, NoticeStatus, Webhook
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, Unresolved
from conveyor.usecases import webhook
from conveyor.usecases import webhook as hmac_keys
from conveyor.usecases import webhook as webhooks
from conveyor.usecases.context import Context
from conveyor.usecases.run import rerun
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, ManualClock, a_ulid
from tests.usecases.world import OTHER_CALLER, submit, work

HOOK = Webhook("https://example.com/hook")
OTHER_HOOK = Webhook("https://example.org/other")
SIGNED = Webhook(HOOK.url, signature=True)


@dataclass
class Receiver:
    unresolved: Unresolved | None = None
    outcome: Delivered | NotDelivered = field(default_factory=lambda: Delivered(200))
    messages: list[Message] = field(default_factory=list)

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        return self.unresolved

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        self.messages.append(message)
        return self.outcome


async def a_job_with_notices(env: Context, runs: int = 1) -> tuple[JobId, list[Notice]]:
    """A job whose runs have ended, and its notices, oldest first."""
    accepted = await submit(env, 1, webhook=HOOK)
    await work(env, accepted.run)
    for _ in range(runs - 1):
        again = await rerun.rerun(
            env, CALLER, accepted.job.job_id, retry=None, run_id=RunId(env.new_id())
        )
        await work(env, again.run)
    return accepted.job.job_id, await webhook.due(env, limit=100)


async def deliver_due(env: Context, receiver: Receiver) -> None:
    for notice in await webhook.due(env, limit=100):
        ready = await webhook.prepare(env, notice)
        if ready is not None:
            await webhook.deliver(env, receiver, ready)


async def now_of(env: Context, notice: Notice) -> Notice:
    current = await env.store.read(NoticeKey(notice.notice_id))
    assert current is not None
    return current


@pytest.mark.parametrize(("is_temporary", "retry_after_s"), [(True, 5.0), (False, None)])
async def test_an_unresolvable_host_is_refused_permanently_only_if_it_does_not_exist(
    env: Context, is_temporary: bool, retry_after_s: float | None
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await webhooks.check(env, Receiver(Unresolved(is_temporary)), CALLER, HOOK)

    assert refused.value.code == "callback_url_unresolvable"
    assert refused.value.retry_after_s == retry_after_s


async def test_signing_needs_an_active_key_of_the_caller(env: Context) -> None:
    await hmac_keys.rotate(env, OTHER_CALLER, kid=a_ulid(1))

    with pytest.raises(InvalidArgument) as refused:
        await webhooks.check(env, Receiver(), CALLER, SIGNED)
    await hmac_keys.rotate(env, CALLER, kid=a_ulid(2))
    await webhooks.check(env, Receiver(), CALLER, SIGNED)

    assert refused.value.code == "webhook_signing_requires_active_key"


async def test_a_retried_submit_does_not_validate_its_webhook_again(env: Context) -> None:
    accepted = await submit(env, 1, webhook=HOOK)
    gone = Receiver(Unresolved(is_temporary=False))

    await webhooks.validate_new(env, gone, CALLER, HOOK, accepted.job.job_id)
    with pytest.raises(InvalidArgument):
        await webhooks.validate_new(env, gone, CALLER, HOOK, JobId(env.new_id()))


async def test_a_changed_url_applies_to_pending_deliveries(env: Context) -> None:
    job_id, _ = await a_job_with_notices(env)
    receiver = Receiver()

    await webhooks.replace(env, receiver, CALLER, job_id, OTHER_HOOK)
    await deliver_due(env, receiver)

    assert [message.webhook for message in receiver.messages] == [OTHER_HOOK]


async def test_removing_a_webhook_drops_pending_deliveries_even_if_one_is_set_again(
    env: Context,
) -> None:
    job_id, (notice,) = await a_job_with_notices(env)
    receiver = Receiver()

    await webhooks.remove(env, CALLER, job_id)
    await webhooks.remove(env, CALLER, job_id)
    await webhooks.replace(env, receiver, CALLER, job_id, HOOK)
    await deliver_due(env, receiver)

    assert receiver.messages == []
    assert (await now_of(env, notice)).status is NoticeStatus.DROPPED


async def test_a_deleted_job_accepts_no_webhook(env: Context) -> None:
    job_id, _ = await a_job_with_notices(env)
    await jobs.delete(env, CALLER, job_id)

    with pytest.raises(NotFound):
        await webhooks.replace(env, Receiver(), CALLER, job_id, HOOK)

    job = await env.store.read(JobKey(job_id))
    assert job is not None
    assert job.webhook is None


@pytest.mark.parametrize("outcome", [Delivered(200), NotDelivered("http_4xx:410", 410, gone=True)])
async def test_an_event_is_redelivered_with_the_same_id_and_bytes(
    env: Context, clock: ManualClock, outcome: Delivered | NotDelivered
) -> None:
    job_id, (notice,) = await a_job_with_notices(env)
    receiver = Receiver(outcome=outcome)
    await deliver_due(env, receiver)
    clock.advance(100 * 3600)

    again = await webhooks.redeliver(env, CALLER, job_id, notice.notice_id)
    receiver.outcome = Delivered(200)
    await deliver_due(env, receiver)

    first, second = receiver.messages
    assert (first.event_id, first.payload) == (second.event_id, second.payload)
    assert again.status is NoticeStatus.DUE
    current = await now_of(env, notice)
    assert (current.status, current.attempts) == (NoticeStatus.DELIVERED, 2)


async def test_an_attempt_under_way_does_not_undo_a_redelivery(env: Context) -> None:
    job_id, (notice,) = await a_job_with_notices(env)

    class Impatient(Receiver):
        async def deliver(self, message: Message) -> Delivered | NotDelivered:
            await webhooks.redeliver(env, CALLER, job_id, message.event_id)
            return Delivered(200)

    await deliver_due(env, Impatient())

    assert [due.notice_id for due in await webhook.due(env, limit=10)] == [notice.notice_id]


async def test_only_an_event_of_the_job_itself_can_be_redelivered(env: Context) -> None:
    job_id, _ = await a_job_with_notices(env)
    other_id, others = await a_job_with_notices(env)
    foreign = next(notice for notice in others if notice.job_id == other_id)

    for event_id in (foreign.notice_id, "NOTHING"):
        with pytest.raises(NotFound):
            await webhooks.redeliver(env, CALLER, job_id, event_id)


async def test_without_a_webhook_nothing_can_be_redelivered(env: Context) -> None:
    job_id, (notice,) = await a_job_with_notices(env)
    await webhooks.remove(env, CALLER, job_id)

    with pytest.raises(NotFound, match="no webhook"):
        await webhooks.redeliver(env, CALLER, job_id, notice.notice_id)


async def test_the_delivery_log_is_paged_without_gaps(env: Context, clock: ManualClock) -> None:
    job_id, events = await a_job_with_notices(env, runs=5)

    seen: list[Notice] = []
    cursor = None
    while True:
        page = await webhooks.page(env, CALLER, job_id, cursor=cursor, limit=2)
        seen += page.notices
        if (cursor := page.next_cursor) is None:
            break

    assert sorted(seen, key=lambda notice: notice.notice_id) == sorted(
        events, key=lambda notice: notice.notice_id
    )
    assert [notice.run_id for notice in seen] == sorted((n.run_id for n in events), reverse=True)
