"""Notices: delivered at least once, repeated with growing delays, and given up in the end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
import pytest

from conveyor.domain import limits
from conveyor.domain.changes import NoticeKey
from conveyor.domain.ids import NoticeId
from conveyor.domain.model import Notice, NoticeStatus, Webhook
from conveyor.domain.webhook import Secret
from conveyor.engines.system import AesSecretBox
from conveyor.ports.errors import Unavailable
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered
from conveyor.usecases import webhook
from conveyor.usecases import webhook as hmac_keys
from conveyor.usecases.context import Context
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import CALLER, T0, ManualClock, a_change, a_ulid, keep, update
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import submit, work

HOOK = Webhook("https://example.com/hook")


@dataclass
class Receiver:
    """A receiver with scripted answers that records every delivery."""

    answers: list[Delivered | NotDelivered]
    deliveries: list[tuple[str, str, str]] = field(default_factory=list)
    secrets: tuple[Secret, ...] = ()

    async def resolve(self, webhook: Webhook, partition: str) -> None:
        return None

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        self.deliveries.append((message.event_id, message.payload, message.webhook.url))
        self.secrets = message.secrets
        return self.answers.pop(0) if self.answers else NotDelivered("http_5xx", 500)


async def a_job_with_notices(env: Context, receiver: Webhook = HOOK) -> tuple[Accepted, Notice]:
    accepted = await submit(env, 1, webhook=receiver)
    await work(env, accepted.run)
    (notice,) = await webhook.due(env, limit=10)
    return accepted, notice


async def deliver(env: Context, receiver: Receiver, notice: Notice) -> None:
    """Makes one delivery attempt if the notice can be claimed."""
    ready = await webhook.prepare(env, notice)
    if ready is not None:
        await webhook.deliver(env, receiver, ready)


async def now_of(env: Context, notice: Notice) -> Notice:
    current = await env.store.read(NoticeKey(notice.notice_id))
    assert current is not None
    return current


async def test_a_delivered_notice_is_not_due_again(env: Context) -> None:
    _, notice = await a_job_with_notices(env)
    receiver = Receiver([Delivered(200)])

    await deliver(env, receiver, notice)

    assert (await now_of(env, notice)).status is NoticeStatus.DELIVERED
    assert await webhook.due(env, limit=10) == []
    assert receiver.deliveries == [(notice.notice_id, notice.payload, HOOK.url)]


async def test_a_failed_notice_is_delivered_later_with_the_same_bytes(
    env: Context, clock: ManualClock
) -> None:
    _, notice = await a_job_with_notices(env)
    receiver = Receiver([NotDelivered("timeout"), Delivered(200)])

    await deliver(env, receiver, notice)
    at_once = await webhook.due(env, limit=10)
    clock.advance(6)
    (again,) = await webhook.due(env, limit=10)
    await deliver(env, receiver, again)

    assert at_once == []
    assert (again.attempts, again.last_error) == (1, "timeout")
    assert receiver.deliveries[0] == receiver.deliveries[1]
    assert (await now_of(env, notice)).attempts == 2


async def test_a_receiver_that_asks_for_a_delay_gets_it(env: Context, clock: ManualClock) -> None:
    _, notice = await a_job_with_notices(env)

    await deliver(env, Receiver([NotDelivered("http_4xx", 429, 600.0)]), notice)

    clock.advance(500)
    assert await webhook.due(env, limit=10) == []
    clock.advance(200)
    assert len(await webhook.due(env, limit=10)) == 1


async def test_a_receiver_that_is_gone_gets_no_more_deliveries(env: Context) -> None:
    _, notice = await a_job_with_notices(env)

    await deliver(env, Receiver([NotDelivered("gone", 410, gone=True)]), notice)

    assert (await now_of(env, notice)).status is NoticeStatus.EXHAUSTED


async def test_a_notice_is_tried_for_three_days_and_then_recorded_as_exhausted(
    env: Context, clock: ManualClock
) -> None:
    _, notice = await a_job_with_notices(env)
    receiver = Receiver([])
    tries = 0
    while (current := await now_of(env, notice)).status is NoticeStatus.DUE:
        clock.at = current.due_at
        await deliver(env, receiver, current)
        tries += 1

    assert current.status is NoticeStatus.EXHAUSTED
    assert current.last_error == "http_5xx"
    assert current.attempts == tries == len(receiver.deliveries)
    assert clock.at - notice.occurred_at > limits.WEBHOOK_GIVE_UP_S
    assert 10 < tries < 40


async def test_only_one_of_two_deliverers_makes_the_attempt(env: Context) -> None:
    _, notice = await a_job_with_notices(env)
    first, second = Receiver([NotDelivered("timeout")]), Receiver([Delivered(200)])

    await deliver(env, first, notice)
    await deliver(env, second, notice)

    current = await now_of(env, notice)
    assert (current.attempts, current.last_error) == (1, "timeout")
    assert second.deliveries == []


async def test_an_interrupted_attempt_is_repeated_with_the_same_bytes(
    env: Context, clock: ManualClock
) -> None:
    _, notice = await a_job_with_notices(env)
    receiver = Receiver([Delivered(200), Delivered(200)])
    with pytest.raises(Unavailable):
        await deliver(with_fault(env, Fault(2, When.BEFORE, only="commit")), receiver, notice)

    clock.advance(limits.WEBHOOK_CLAIM_S - 1)
    too_soon = await webhook.due(env, limit=10)
    clock.advance(1)
    (again,) = await webhook.due(env, limit=10)
    await deliver(env, receiver, again)

    assert too_soon == []
    assert receiver.deliveries[0] == receiver.deliveries[1]
    assert (await now_of(env, notice)).status is NoticeStatus.DELIVERED


@pytest.mark.parametrize("when", When)
async def test_an_outage_at_any_call_of_a_delivery_loses_no_notice(
    env: Context, clock: ManualClock, when: When
) -> None:
    for at in count(1):
        _, notice = await a_job_with_notices(env)
        fault, receiver = Fault(at, when), Receiver([Delivered(200)] * 2)

        with suppress(Unavailable):
            await deliver(with_fault(env, fault), receiver, notice)
        clock.advance(limits.WEBHOOK_CLAIM_S)
        for again in await webhook.due(env, limit=10):
            await deliver(env, receiver, again)

        assert (await now_of(env, notice)).status is NoticeStatus.DELIVERED
        assert set(receiver.deliveries) == {(notice.notice_id, notice.payload, HOOK.url)}
        if not fault.was_reached:
            break
    assert at == 5


async def test_every_attempt_is_logged_with_its_outcome(env: Context, clock: ManualClock) -> None:
    _, notice = await a_job_with_notices(env)
    receiver = Receiver([NotDelivered("http_5xx:503", 503), Delivered(204)])

    await deliver(env, receiver, notice)
    clock.advance(6)
    (again,) = await webhook.due(env, limit=10)
    await deliver(env, receiver, again)

    first, second = (await now_of(env, notice)).tries
    assert (first.at, first.status, first.error) == (T0, 503, "http_5xx:503")
    assert (second.at, second.status, second.error) == (T0 + 6, 204, None)


async def test_a_later_event_of_a_run_waits_for_the_earlier_one(
    env: Context, clock: ManualClock
) -> None:
    _, first = await a_job_with_notices(env)
    later = msgspec.structs.replace(
        first, notice_id=NoticeId("LATER"), occurred_at=first.occurred_at + 1
    )
    await keep(env.store, later)
    receiver = Receiver([NotDelivered("timeout"), Delivered(200), Delivered(200)])

    for _ in range(60):
        for notice in reversed(await webhook.due(env, limit=10)):
            await deliver(env, receiver, notice)
        clock.advance(1)

    assert [event_id for event_id, *_ in receiver.deliveries] == [first.notice_id] * 2 + ["LATER"]
    assert (await now_of(env, later)).attempts == 1


async def test_an_exhausted_event_does_not_delay_the_next(env: Context) -> None:
    _, first = await a_job_with_notices(env)
    later = msgspec.structs.replace(
        first, notice_id=NoticeId("LATER"), occurred_at=first.occurred_at + 1
    )
    await keep(env.store, later)
    receiver = Receiver([NotDelivered("http_4xx:410", 410, gone=True), Delivered(200)])

    await deliver(env, receiver, first)
    await deliver(env, receiver, later)

    assert (await now_of(env, later)).status is NoticeStatus.DELIVERED


async def test_a_signed_webhook_is_signed_with_every_key_in_use(env: Context) -> None:
    _, notice = await a_job_with_notices(env, Webhook(HOOK.url, signature=True))
    for number in (1, 2):
        await hmac_keys.rotate(env, CALLER, kid=a_ulid(number))
    receiver = Receiver([Delivered(200)])

    await deliver(env, receiver, notice)

    assert [secret.kid for secret in receiver.secrets] == [a_ulid(1), a_ulid(2)]


async def test_without_its_key_a_signed_webhook_waits_and_is_not_sent_unsigned(
    env: Context,
) -> None:
    _, notice = await a_job_with_notices(env, Webhook(HOOK.url, signature=True))
    await hmac_keys.rotate(env, CALLER, kid=a_ulid(1))
    receiver = Receiver([Delivered(200)])

    await deliver(
        replace(env, secret_box=AesSecretBox(b"another secret, of 32 bytes long")), receiver, notice
    )

    current = await now_of(env, notice)
    assert (current.status, current.last_error) == (NoticeStatus.DUE, "signing_key_unavailable")
    assert receiver.deliveries == []


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_notice_without_a_webhook_is_dropped(env: Context, is_deleted: bool) -> None:
    accepted, notice = await a_job_with_notices(env)
    receiver = Receiver([])
    if is_deleted:
        await jobs.delete(env, CALLER, accepted.job.job_id)
    else:
        await _remove_webhook(env, accepted)

    await deliver(env, receiver, notice)

    assert (await now_of(env, notice)).status is NoticeStatus.DROPPED
    assert receiver.deliveries == []


async def _remove_webhook(env: Context, accepted: Accepted) -> None:
    await env.commit(a_change(update(accepted.job, webhook=None)))
