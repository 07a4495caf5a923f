"""WebhookNotifier: what a receiver gets, and how its answers are treated (SPEC.md 4.16)."""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock
from zenrows.batch import verify_webhook_signature

from conveyor.domain.model import Webhook
from conveyor.domain.submit.target import TargetPolicy
from conveyor.domain.webhook import Secret
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import connect
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, Unresolved
from tests.engines.http.conftest import NOW, TLS, now
from tests.http_client.server import Peer, answering, raw_server, reply
from tests.http_client.test_stream import Certificate, loopback


def to(url: str, *secrets: Secret) -> Message:
    return Message(
        event_id="01HF0000000000000000000000",
        payload='{"event":"é"}',
        webhook=Webhook(url, signature=bool(secrets)),
        partition="a caller",
        secrets=secrets,
    )


async def deliver(pool: HttpPool, answer: bytes) -> Delivered | NotDelivered:
    async with raw_server(answering(answer)) as server:
        return await WebhookNotifier(pool, now=now).deliver(to(server.url("/hook")))


async def test_a_receiver_gets_the_payload_and_the_event_id(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"thanks", "202 Accepted"))) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(to(server.url("/hook")))

    assert outcome == Delivered(202)
    sent = server.requests[0]
    assert sent.startswith(b"POST /hook HTTP/1.1\r\n")
    assert b"\r\nContent-Type: application/json\r\n" in sent
    assert b"\r\nX-ZenRows-Event-Id: 01HF0000000000000000000000\r\n" in sent
    assert b"\r\nwebhook-id: 01HF0000000000000000000000\r\n" in sent
    assert b"X-Signature" not in sent
    assert b"webhook-signature" not in sent
    assert sent.endswith(b"\r\n\r\n" + '{"event":"é"}'.encode())


async def test_every_attempt_sends_the_same_bytes(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"", "500 No"))) as server:
        notifier = WebhookNotifier(pool, now=now)
        await notifier.deliver(to(server.url()))
        await notifier.deliver(to(server.url()))

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


async def test_the_signature_of_a_delivery_is_valid_for_the_received_bytes(pool: HttpPool) -> None:
    secret = Secret("01HF0000000000000000000001", b"s" * 32)
    async with raw_server(answering(reply())) as server:
        await WebhookNotifier(pool, now=now).deliver(to(server.url(), secret))

    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    (signature,) = re.findall(r"^X-Signature: (.*)\r$", head.decode() + "\r", re.MULTILINE)
    shared = {secret.kid: base64.b64encode(secret.key).decode()}
    assert verify_webhook_signature(body, signature, shared, now=NOW)


async def test_a_redirect_to_a_metadata_service_is_a_failure_and_is_not_followed() -> None:
    dialled: list[str] = []

    async def counting(address: str, port: int) -> socket.socket:
        dialled.append(address)
        return await connect(address, port)

    pool = HttpPool(TargetPolicy(allow_private=True), tls=TLS, connect=counting)
    where = {"Location": "http://169.254.169.254/latest/meta-data/"}
    outcome = await deliver(pool, reply(b"", "301 Moved", where))
    pool.close()

    assert outcome == NotDelivered("http_3xx:301", 301)
    assert dialled == ["127.0.0.1"]


async def test_a_receiver_that_answers_too_slowly_is_a_timeout(pool: HttpPool) -> None:
    """The limits are tenths of a second here. Each byte comes in time, but the whole answer does
    not."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            await peer.send(b"x")
            await trio.sleep(0.01)

    async with raw_server(handler) as server:
        notifier = WebhookNotifier(pool, now=now, timeout_s=0.1)
        outcome = await notifier.deliver(to(server.url()))

    assert outcome == NotDelivered("timeout")


@pytest.mark.parametrize("host", ["127.0.0.1", "site.test", "wrong.test"])
async def test_an_untrusted_certificate_is_a_transport_error(host: str, tmp_path: Path) -> None:
    site = Certificate(tmp_path)
    # The last certificate is trusted, but for another name.
    tls = site.client if host == "wrong.test" else TLS
    pool = HttpPool(TargetPolicy(allow_private=True), lookup=loopback, tls=tls)
    async with raw_server(answering(reply()), site.server) as server:
        url = f"https://{host}:{server.port}/hook"
        outcome = await WebhookNotifier(pool, now=now).deliver(to(url))

    assert isinstance(outcome, NotDelivered)
    assert outcome.error.startswith("transport_error:the certificate is not trusted")
    assert server.requests == []


def looking_up(answer: list[str] | OSError | None) -> HttpPool:
    async def lookup(_host: str) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, OSError):
            raise answer
        return answer or []

    return HttpPool(TargetPolicy(), lookup=lookup, tls=TLS)


@pytest.mark.parametrize(
    ("answer", "unresolved"),
    [
        (["93.184.216.34"], None),
        (["10.0.0.1"], Unresolved(is_temporary=False)),
        (["93.184.216.34", "169.254.169.254"], Unresolved(is_temporary=False)),
        (["93.184.216.34", "2a01::5efe:a9fe:a9fe"], Unresolved(is_temporary=False)),
        (["4000::1"], Unresolved(is_temporary=False)),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), Unresolved(is_temporary=False)),
        (socket.gaierror(socket.EAI_AGAIN, "later"), Unresolved(is_temporary=True)),
        (None, Unresolved(is_temporary=True)),
    ],
    ids=["public", "private", "half public", "wrapped", "reserved", "unknown", "later", "never"],
)
async def test_the_name_of_a_receiver_is_resolved_within_a_second_or_reported_as_unresolved(
    answer: list[str] | OSError | None, unresolved: Unresolved | None, autojump_clock: MockClock
) -> None:
    notifier = WebhookNotifier(looking_up(answer), now=now)
    started_at = trio.current_time()

    assert await notifier.resolve(Webhook("https://hooks.example.com/"), "a caller") == unresolved
    assert trio.current_time() - started_at <= 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30.0),
        ("999999999", 86400.0),
        ("-1", None),
        (formatdate(NOW + 10 * 86400, usegmt=True), 86400.0),
    ],
)
async def test_a_receiver_may_ask_for_a_delay_of_at_most_a_day(
    pool: HttpPool, value: str, seconds: float | None
) -> None:
    outcome = await deliver(pool, reply(b"", "429 No", {"Retry-After": value}))

    assert isinstance(outcome, NotDelivered)
    assert outcome.retry_after_s == seconds


async def test_at_most_64_kib_of_an_endless_answer_are_read(pool: HttpPool) -> None:
    sent = [0]

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await peer.send(b"x" * 65536)
            sent[0] += 65536

    async with raw_server(handler) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(to(server.url()))

    assert outcome == Delivered(200)
    assert sent[0] < 50_000_000


async def test_a_receiver_without_an_answer_times_out() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.wait_closed()

    pool = HttpPool(TargetPolicy(allow_private=True), PoolLimits(read_timeout_s=0.03), tls=TLS)
    async with raw_server(handler) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(to(server.url()))

    assert outcome == NotDelivered("timeout")


async def test_a_connection_reset_by_the_receiver_is_a_transport_error(pool: HttpPool) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        peer.abort()

    async with raw_server(handler) as server:
        outcome = await WebhookNotifier(pool, now=now).deliver(to(server.url()))

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
    outcome = await WebhookNotifier(pool, now=now).deliver(to(url))

    assert outcome == NotDelivered(error)
