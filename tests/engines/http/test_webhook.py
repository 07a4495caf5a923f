"""WebhookNotifier: what a receiver gets, and what its answers mean (SPEC 6.6)."""

from __future__ import annotations

from collections.abc import Sequence
from email.utils import formatdate

import pytest
import trio

from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.ids import JobId, NoticeId, RunId
from conveyor.domain.model import Notice, NoticeStatus, Webhook
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.net.pool import HttpPool
from conveyor.net.slots import PoolLimits
from conveyor.ports.notifier import Delivered, NotDelivered
from tests.engines.http.conftest import NOW, TLS, now
from tests.net.server import Peer, answering, raw_server, reply

NOTICE = Notice(
    notice_id=NoticeId("01HF0000000000000000000000"),
    job_id=JobId("job"),
    run_id=RunId("run"),
    event_type="run.completed",
    status=NoticeStatus.DUE,
    occurred_at=NOW,
    due_at=NOW,
    payload='{"event":"é"}',
)


async def deliver(pool: HttpPool, answer: bytes) -> Delivered | NotDelivered:
    async with raw_server(answering(answer)) as server:
        return await WebhookNotifier(pool, now=now).deliver(NOTICE, Webhook(server.url("/hook")))


async def test_a_receiver_gets_the_payload_and_the_event_id(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"thanks", "202 Accepted"))) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(NOTICE, Webhook(server.url("/hook")))

    assert outcome == Delivered(202)
    sent = server.requests[0]
    assert sent.startswith(b"POST /hook HTTP/1.1\r\n")
    assert b"\r\nContent-Type: application/json\r\n" in sent
    assert b"\r\nX-ZenRows-Event-Id: 01HF0000000000000000000000\r\n" in sent
    assert sent.endswith(b"\r\n\r\n" + '{"event":"é"}'.encode())


async def test_every_try_sends_the_same_bytes(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"", "500 No"))) as server:
        notifier = WebhookNotifier(pool, now=now)
        await notifier.deliver(NOTICE, Webhook(server.url()))
        await notifier.deliver(NOTICE, Webhook(server.url()))

    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize(
    ("status", "error", "gone"),
    [
        (301, "http_3xx:301", False),
        (307, "http_3xx:307", False),
        (400, "http_4xx:400", False),
        (410, "http_4xx:410", True),
        (500, "http_5xx:500", False),
        (503, "http_5xx:503", False),
    ],
)
async def test_anything_but_a_2xx_is_not_delivered(
    pool: HttpPool, status: int, error: str, gone: bool
) -> None:
    answer = reply(b"", f"{status} No", {"Location": "http://169.254.169.254/"})
    outcome = await deliver(pool, answer)

    assert outcome == NotDelivered(error, status, None, gone)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30.0),
        ("999999999", 86400.0),
        ("-1", None),
        (formatdate(NOW + 10 * 86400, usegmt=True), 86400.0),
    ],
)
async def test_a_receiver_may_ask_for_a_day_at_most(
    pool: HttpPool, value: str, seconds: float | None
) -> None:
    outcome = await deliver(pool, reply(b"", "429 No", {"Retry-After": value}))

    assert isinstance(outcome, NotDelivered)
    assert outcome.retry_after_s == seconds


async def test_a_receiver_that_streams_for_ever_is_read_for_64_kib(pool: HttpPool) -> None:
    sent = [0]

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await peer.send(b"x" * 65536)
            sent[0] += 65536

    async with raw_server(handler) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(NOTICE, Webhook(server.url()))

    assert outcome == Delivered(200)
    assert sent[0] < 50_000_000


async def test_a_receiver_that_says_nothing_times_out() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.wait_closed()

    pool = HttpPool(TargetPolicy(allow_private=True), PoolLimits(read_timeout_s=0.03), tls=TLS)
    async with raw_server(handler) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(NOTICE, Webhook(server.url()))

    assert outcome == NotDelivered("timeout")


async def test_a_receiver_that_resets_is_a_transport_error(pool: HttpPool) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        peer.abort()

    async with raw_server(handler) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(NOTICE, Webhook(server.url()))

    assert isinstance(outcome, NotDelivered)
    assert outcome.error == "transport_error:connection reset"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://hooks.example.com/", "transport_error:https is required"),
        ("https://127.0.0.1/", "transport_error:the target is a private address"),
        ("https://rebound.example.com/", "transport_error:the target is a private address"),
        ("https://169.254.169.254/", "transport_error:the target is a metadata service"),
        ("https://user:pw@example.com/", "transport_error:malformed_url"),
    ],
)
async def test_a_receiver_must_be_a_public_https_site(url: str, error: str) -> None:
    async def lookup(_host: str) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        return ["10.0.0.1"]

    pool = HttpPool(TargetPolicy(), lookup=lookup, tls=TLS)
    outcome = await WebhookNotifier(pool, now=now).deliver(NOTICE, Webhook(url))

    assert outcome == NotDelivered(error)
