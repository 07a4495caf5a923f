"""CompletionNotifier over days of virtual time: no event is lost, and no receiver delays
another."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock
from zenrows.batch import WebhookEvent, verify_webhook_signature

from actors.completion_notifier import CompletionNotifier
from conveyor.domain import limits
from conveyor.domain import webhook as webhooks
from conveyor.domain.ids import JobId
from conveyor.domain.model import Notice, NoticeStatus, Webhook
from conveyor.domain.queries import DueNotices, NoticesOf
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered
from conveyor.usecases import clock_repairs
from conveyor.usecases import webhook as hmac_keys
from conveyor.usecases.context import Context
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.faults import has_crashed_actor
from tests.actors.receivers import Internet, ReceivedRequest
from tests.actors.world import CALLER, SetClock, World, make_world, urls
from tests.builders import a_job, a_notice, a_ulid, keep

pytestmark = pytest.mark.slow

HOUR_S = 3600.0
SIGNED = Webhook("http://receiver.test/hook", signature=True)


@asynccontextmanager
async def notifying(world: World, period_s: float = 1.0) -> AsyncGenerator[Internet, None]:
    """Runs the notifier with a network of its own. A long period makes days of virtual time
    cheap."""
    async with trio.open_nursery() as nursery:
        internet = Internet(world.env.clock, nursery)
        notifier = CompletionNotifier(
            env=world.env, notifier=internet.notifier(), period_s=period_s
        )
        nursery.start_soon(notifier.run)
        yield internet
        nursery.cancel_scope.cancel()


async def scrape_all(world: World, internet: Internet, count: int, webhook: Webhook) -> Accepted:
    """A run whose tasks were all fetched by a worker with a notifier of its own."""
    world = replace(world, notifier=internet.notifier())  # type: ignore[arg-type]
    async with world.working():
        accepted = await world.submit(urls(count), webhook=webhook)
        _, totals = await world.wait_for_end(accepted, within_s=60)
    assert totals.successful == count
    return accepted


async def notices_of(env: Context, job_id: JobId) -> list[Notice]:
    return await env.store.find(NoticesOf(job_id=job_id, limit=1000))


async def a_backlog(env: Context, url: str, count: int, first: int = 0) -> list[Notice]:
    """Events of so many runs, all due, for one receiver."""
    job_id = JobId(a_ulid(first))
    notices = [
        a_notice(
            number,
            job_id=job_id,
            run_id=a_ulid(number),
            occurred_at=env.now() - 60 + number / 1000,
            due_at=env.now() - 60 + number / 1000,
            due_since=env.now(),
        )
        for number in range(first, first + count)
    ]
    await keep(env.store, a_job(job_id, caller=CALLER, webhook=Webhook(url)), *notices)
    return notices


async def test_a_receiver_that_is_down_for_a_day_gets_every_event(
    autojump_clock: MockClock,
) -> None:
    """Fetches continue meanwhile. Two notifiers share the outbox while a worker runs."""
    world = make_world()
    key = await hmac_keys.rotate(world.env, CALLER, kid=a_ulid(1))
    shared = {key.key.kid: base64.b64encode(key.secret).decode()}
    began = world.env.now()

    async with notifying(world, period_s=60) as internet:
        internet.up_at["/hook"] = began + 24 * HOUR_S
        accepted = []
        for _ in range(12):
            accepted.append(await scrape_all(world, internet, 5, SIGNED))
            await trio.sleep(2 * HOUR_S)
        await trio.sleep(10 * HOUR_S)
        rows = [
            row
            for submitted in accepted
            for row in await notices_of(world.env, submitted.job.job_id)
        ]

    assert {row.status for row in rows} == {NoticeStatus.DELIVERED}
    assert Counter(request.event_id for request in internet.accepted) == {
        row.notice_id: 1 for row in rows
    }
    assert min(request.at for request in internet.accepted) >= began + 24 * HOUR_S - 1
    assert len(internet.requests) > 3 * len(rows)
    for row in rows:
        tries = [request for request in internet.requests if request.event_id == row.notice_id]
        assert {request.body.decode() for request in tries} == {row.payload}
        assert {request.headers["webhook-id"] for request in tries} == {row.notice_id}
    assert all(is_signed(request, shared) for request in internet.requests)
    WebhookEvent.model_validate(json.loads(internet.accepted[0].body))


def is_signed(request: ReceivedRequest, shared: dict[str, str]) -> bool:
    """Verifies a request as a receiver does when it arrives."""
    header = request.headers["x-signature"]
    is_ours: bool = verify_webhook_signature(request.body, header, shared, now=request.at)
    return is_ours


async def test_events_of_a_run_arrive_in_order_although_deliveries_fail(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    start = world.env.now()
    events = [
        a_notice(9 - number, occurred_at=start + number, due_at=start, due_since=start)
        for number in range(4)
    ]
    hooked = a_job(caller=CALLER, webhook=Webhook("http://receiver.test/hook"))
    await keep(world.env.store, hooked, *events)

    async with notifying(world, period_s=5) as internet:
        internet.up_at["/hook"] = start + 2 * HOUR_S
        await trio.sleep(8 * HOUR_S)

    arrived = [request.event_id for request in internet.requests]
    assert [request.event_id for request in internet.accepted] == [
        event.notice_id for event in events
    ]
    assert arrived == sorted(arrived, reverse=True)


async def test_a_receiver_that_never_recovers_is_given_up_after_three_days(
    autojump_clock: MockClock,
) -> None:
    world = make_world()

    async with notifying(world, period_s=60) as internet:
        internet.is_up = False
        accepted = await scrape_all(world, internet, 1, Webhook("http://receiver.test/hook"))
        await trio.sleep(limits.WEBHOOK_GIVE_UP_S - HOUR_S)
        (before,) = await notices_of(world.env, accepted.job.job_id)
        await trio.sleep(10 * HOUR_S)
        (after,) = await notices_of(world.env, accepted.job.job_id)

    assert before.status is NoticeStatus.DUE
    assert (after.status, after.last_error) == (
        NoticeStatus.EXHAUSTED,
        "transport_error:connection refused",
    )
    assert 10 < after.attempts == len(after.tries)
    assert after.tries[-1].at - after.occurred_at > limits.WEBHOOK_GIVE_UP_S


@pytest.mark.parametrize("step_s", [-40 * 24 * HOUR_S, 40 * 24 * HOUR_S])
async def test_an_event_is_attempted_as_often_as_another_if_its_clock_is_set(
    autojump_clock: MockClock, step_s: float
) -> None:
    """The receiver is down for a day, and the clock is set meanwhile."""
    clock = SetClock()
    world = make_world(clock=clock)
    (notice,) = await a_backlog(world.env, "http://receiver.test/hook", 1)

    async with notifying(world, period_s=60) as internet:
        internet.is_up = False
        await trio.sleep(HOUR_S)
        clock.offset_s += step_s
        await clock_repairs.pull_back(world.env)
        await trio.sleep(23 * HOUR_S)
        internet.is_up = True
        await trio.sleep(10 * HOUR_S)
        (after,) = await notices_of(world.env, notice.job_id)

    assert len(internet.accepted) == 1
    assert after.attempts < 2 * len(webhooks.RETRY_SCHEDULE_S)


async def test_hundreds_of_events_for_a_dead_receiver_do_not_delay_the_others(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    dead = await a_backlog(world.env, "http://dead.test/dead", 300)
    fine = await a_backlog(world.env, "http://fine.test/fine", 50, first=2000)

    async with notifying(world) as internet:
        internet.takes_s["/dead"] = 60.0
        started_at = world.env.now()
        with trio.fail_after(40):
            while len(internet.accepted) < len(fine):
                await trio.sleep(0.1)
        took_s = world.env.now() - started_at
        await trio.sleep(10 * 60)
        asked_dead = sum(request.path == "/dead" for request in internet.requests)

        internet.takes_s["/dead"] = 0.05
        await trio.sleep(HOUR_S)

    # Only the first four were attempted while the others were delivered.
    assert took_s < 2 * limits.WEBHOOK_TIMEOUT_S
    assert asked_dead < 20
    assert {request.event_id for request in internet.accepted} == {
        notice.notice_id for notice in (*dead, *fine)
    }


async def test_a_slow_receiver_gets_its_events_at_the_rate_it_can_handle(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    slow = await a_backlog(world.env, "http://slow.test/slow", 150)
    fine = await a_backlog(world.env, "http://fine.test/fine", 50, first=2000)

    async with notifying(world) as internet:
        internet.takes_s["/slow"] = 10.0
        await trio.sleep(30)
        at_half_a_minute = Counter(request.path for request in internet.accepted)
        await trio.sleep(150 / 4 * 10 * 1.5)

    assert at_half_a_minute["/fine"] == len(fine)
    assert 8 <= at_half_a_minute["/slow"] <= 12
    assert Counter(request.path for request in internet.accepted) == {
        "/fine": 50,
        "/slow": len(slow),
    }


async def test_undelivered_events_are_delivered_after_a_restart(autojump_clock: MockClock) -> None:
    world = make_world()
    notices = await a_backlog(world.env, "http://receiver.test/hook", 20)

    async with notifying(world) as internet:
        internet.takes_s["/hook"] = 5.0
        await trio.sleep(7)
    first = internet.accepted
    async with notifying(world) as internet:
        await trio.sleep(2 * limits.WEBHOOK_CLAIM_S)

    # A delivery under way at the end is repeated at most once, under the same id.
    arrived = {request.event_id for request in (*first, *internet.accepted)}
    assert arrived == {notice.notice_id for notice in notices}
    assert 0 < len(first) < len(notices)


HOOK = Webhook("https://example.com/hook")


async def test_an_event_is_delivered_again_until_the_receiver_accepts_it(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    world.notifier.failures = 4

    async with world.working():
        accepted = await world.submit(urls(1), webhook=HOOK)
        await world.wait_for_end(accepted)
        await trio.sleep(3_600)

    assert len(world.notifier.tried) == 5
    assert len({message.event_id for message in world.notifier.tried}) == 1
    assert len({message.payload for message in world.notifier.tried}) == 1
    query = DueNotices(
        statuses=frozenset({NoticeStatus.DUE}), due_by=world.env.now() + 1e9, limit=10
    )
    assert await world.env.store.find(query) == []


async def test_a_receiver_that_is_down_does_not_delay_fetches(autojump_clock: MockClock) -> None:
    world = make_world()
    world.notifier.failures = 10**6

    async with world.working():
        await world.wait_for_end(await world.submit(urls(1), webhook=HOOK))
        accepted = await world.submit(urls(100))
        _, totals = await world.wait_for_end(accepted, within_s=60)

    assert totals.successful == 100


class CrashingNotifier:
    """Crashes for every notice to one receiver."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    async def resolve(self, webhook: Webhook, partition: str) -> None:
        return None

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        await trio.lowlevel.checkpoint()
        self.tried.append(message.webhook.url)
        if "poison" in message.webhook.url:
            raise KeyError("a header of the receiver")
        return Delivered(204)


async def test_a_delivery_that_crashes_counts_as_a_failed_attempt(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_GIVE_UP_S", 300.0)
    notifier = CrashingNotifier()
    world = replace(make_world(), notifier=cast("Any", notifier))

    async with world.working():
        poisoned = await world.submit(urls(1), webhook=Webhook("https://poison.example/"))
        good = await world.submit(urls(1), webhook=Webhook("https://good.example/"))
        await world.wait_for_end(poisoned)
        await world.wait_for_end(good)
        await trio.sleep(1800)

    query = NoticesOf(job_id=poisoned.job.job_id, run_id=poisoned.run.run_id, limit=10)
    (notice,) = await world.env.store.find(query)
    assert notifier.tried.count("https://good.example/") == 1
    assert 2 <= notifier.tried.count("https://poison.example/") < 50
    assert notice.last_error == "worker_crashed"
    assert notice.status.value == "exhausted"
    assert not has_crashed_actor(caplog)
