"""Notices: delivered at least once, put off with patience, and given up in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from conveyor.domain import limits
from conveyor.domain.changes import NoticeKey
from conveyor.domain.model import Notice, NoticeStatus, Webhook
from conveyor.ports.notifier import Delivered, NotDelivered
from conveyor.usecases import jobs, notices
from conveyor.usecases.env import Env
from conveyor.usecases.jobs import Accepted
from tests.builders import CALLER, ManualClock, a_change, update
from tests.usecases.world import submit, work

HOOK = Webhook("https://example.com/hook")


@dataclass
class Receiver:
    """A receiver that answers what it is told to, and remembers every delivery."""

    answers: list[Delivered | NotDelivered]
    heard: list[tuple[str, str, str]] = field(default_factory=list)

    async def deliver(self, notice: Notice, webhook: Webhook) -> Delivered | NotDelivered:
        self.heard.append((notice.notice_id, notice.payload, webhook.url))
        return self.answers.pop(0) if self.answers else NotDelivered("http_5xx", 500)


async def a_told_job(env: Env) -> tuple[Accepted, Notice]:
    accepted = await submit(env, 1, webhook=HOOK)
    await work(env, accepted.run)
    (notice,) = await notices.due(env, limit=10)
    return accepted, notice


async def now_of(env: Env, notice: Notice) -> Notice:
    current = await env.store.read(NoticeKey(notice.notice_id))
    assert current is not None
    return current


async def test_a_delivered_notice_is_not_due_again(env: Env) -> None:
    _, notice = await a_told_job(env)
    receiver = Receiver([Delivered(200)])

    await notices.deliver(env, receiver, notice)

    assert (await now_of(env, notice)).status is NoticeStatus.DELIVERED
    assert await notices.due(env, limit=10) == []
    assert receiver.heard == [(notice.notice_id, notice.payload, HOOK.url)]


async def test_a_notice_that_failed_comes_back_later_with_the_same_bytes(
    env: Env, clock: ManualClock
) -> None:
    _, notice = await a_told_job(env)
    receiver = Receiver([NotDelivered("timeout"), Delivered(200)])

    await notices.deliver(env, receiver, notice)
    at_once = await notices.due(env, limit=10)
    clock.advance(6)
    (again,) = await notices.due(env, limit=10)
    await notices.deliver(env, receiver, again)

    assert at_once == []
    assert (again.attempts, again.last_error) == (1, "timeout")
    assert receiver.heard[0] == receiver.heard[1]
    assert (await now_of(env, notice)).attempts == 2


async def test_a_receiver_that_asks_for_time_gets_it(env: Env, clock: ManualClock) -> None:
    _, notice = await a_told_job(env)

    await notices.deliver(env, Receiver([NotDelivered("http_4xx", 429, 600.0)]), notice)

    clock.advance(500)
    assert await notices.due(env, limit=10) == []
    clock.advance(200)
    assert len(await notices.due(env, limit=10)) == 1


async def test_a_receiver_that_is_gone_hears_no_more(env: Env) -> None:
    _, notice = await a_told_job(env)

    await notices.deliver(env, Receiver([NotDelivered("gone", 410, gone=True)]), notice)

    assert (await now_of(env, notice)).status is NoticeStatus.EXHAUSTED


async def test_a_notice_is_tried_for_three_days_and_then_recorded_as_exhausted(
    env: Env, clock: ManualClock
) -> None:
    _, notice = await a_told_job(env)
    receiver = Receiver([])
    tries = 0
    while (current := await now_of(env, notice)).status is NoticeStatus.DUE:
        clock.at = current.due_at
        await notices.deliver(env, receiver, current)
        tries += 1

    assert current.status is NoticeStatus.EXHAUSTED
    assert current.last_error == "http_5xx"
    assert current.attempts == tries == len(receiver.heard)
    assert clock.at - notice.occurred_at > limits.WEBHOOK_GIVE_UP_S
    assert 10 < tries < 40


async def test_two_deliverers_record_one_outcome(env: Env) -> None:
    _, notice = await a_told_job(env)

    await notices.deliver(env, Receiver([Delivered(200)]), notice)
    await notices.deliver(env, Receiver([NotDelivered("timeout")]), notice)

    current = await now_of(env, notice)
    assert (current.status, current.attempts) == (NoticeStatus.DELIVERED, 1)


async def test_the_same_failure_seen_by_two_deliverers_counts_as_one_try(env: Env) -> None:
    _, notice = await a_told_job(env)

    await notices.deliver(env, Receiver([NotDelivered("timeout")]), notice)
    await notices.deliver(env, Receiver([NotDelivered("http_5xx")]), notice)

    current = await now_of(env, notice)
    assert (current.attempts, current.last_error) == (1, "timeout")


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_without_a_webhook_a_notice_is_dropped_untold(env: Env, is_deleted: bool) -> None:
    accepted, notice = await a_told_job(env)
    receiver = Receiver([])
    if is_deleted:
        await jobs.delete(env, CALLER, accepted.job.job_id)
    else:
        await _remove_webhook(env, accepted)

    await notices.deliver(env, receiver, notice)

    assert (await now_of(env, notice)).status is NoticeStatus.DROPPED
    assert receiver.heard == []


async def _remove_webhook(env: Env, accepted: Accepted) -> None:
    await env.commit(a_change(update(accepted.job, webhook=None)))
