"""DirectGateway: pages, redirects and failures as the contract specifies them."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Sequence
from email.utils import formatdate

import pytest

from conveyor.domain.model import FailureReason, Method
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.direct import DirectGateway
from conveyor.http_client.pool import HttpPool
from conveyor.ports.gateway import NotScraped, Scraped
from tests.engines.http.conftest import NOW, TLS, a_request, now
from tests.http_client.server import Peer, answering, raw_server, reply


async def test_a_page_is_scraped_with_its_content_type_and_status(gateway: DirectGateway) -> None:
    page = gzip.compress(b"<html>")
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Encoding": "gzip"}
    async with raw_server(answering(reply(page, "203 Fine", headers))) as server:
        outcome = await gateway.scrape(a_request(server.url("/a?b=1#c")))

    assert outcome == Scraped(status=203, content_type="text/html; charset=utf-8", body=b"<html>")
    head = server.requests[0]
    assert head.startswith(b"GET /a?b=1 HTTP/1.1\r\n")
    assert b"\r\nUser-Agent: conveyor/0.1\r\n" in head
    assert b"\r\nAccept-Encoding: gzip, deflate, br, zstd\r\n" in head


@pytest.mark.parametrize("content_type", ["", "text/\u00e9", "x" * 300])
async def test_an_implausible_content_type_becomes_application_octet_stream(
    gateway: DirectGateway, content_type: str
) -> None:
    answer = reply(b"page", headers={"Content-Type": content_type})
    async with raw_server(answering(answer)) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, Scraped)
    assert outcome.content_type == "application/octet-stream"


@pytest.mark.parametrize("headers", [{}, {"Content-Type": ""}])
async def test_html_without_a_content_type_is_html(
    gateway: DirectGateway, headers: dict[str, str]
) -> None:
    answer = reply(b"\n<!-- shop --><!DOCTYPE html><p>hello", headers=headers)
    async with raw_server(answering(answer)) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, Scraped)
    assert outcome.content_type == "text/html"


async def test_a_post_is_sent_with_its_body_and_content_type(gateway: DirectGateway) -> None:
    async with raw_server(answering(reply(b"ok"))) as server:
        await gateway.scrape(
            a_request(
                server.url(),
                method=Method.POST,
                body=b'{"q":1}',
                body_content_type="application/json",
            )
        )

    assert server.requests[0].startswith(b"POST / ")
    assert b"\r\nContent-Type: application/json\r\n" in server.requests[0]
    assert server.requests[0].endswith(b"\r\n\r\n" + b'{"q":1}')


async def test_custom_headers_replace_defaults_but_not_the_framing_headers(
    gateway: DirectGateway,
) -> None:
    headers = {
        "User-Agent": "mine",
        "content-type": "text/plain",
        "X-Me": "1",
        "Host": "evil.com",
        "Content-Length": "999",
        "Transfer-Encoding": "chunked",
        "Connection": "upgrade",
        "Proxy-Authorization": "x",
        "TE": "trailers",
    }
    async with raw_server(answering(reply(b"ok"))) as server:
        await gateway.scrape(
            a_request(
                server.url(),
                method=Method.POST,
                headers=headers,
                body=b"b",
                body_content_type="application/json",
            )
        )

    head = server.requests[0].lower()
    assert b"\r\nuser-agent: mine\r\n" in head
    assert b"\r\ncontent-type: text/plain\r\n" in head
    assert b"\r\nx-me: 1\r\n" in head
    assert head.count(b"host:") == head.count(b"content-length:") == head.count(b"user-agent:") == 1
    for refused in (b"evil.com", b"999", b"chunked", b"upgrade", b"proxy-", b"application/json"):
        assert refused not in head


@pytest.mark.parametrize("name", ["X: y\r\nEvil", "X Y", "", "é"])
async def test_an_invalid_header_fails_the_task_before_it_is_sent(
    gateway: DirectGateway, name: str
) -> None:
    async with raw_server(answering(reply(b"ok"))) as server:
        outcome = await gateway.scrape(a_request(server.url(), headers={name: "CANARY"}))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (FailureReason.OTHER, False)
    assert "CANARY" not in repr(outcome)
    assert server.connections == 0


@pytest.mark.parametrize("value", ["a\r\nEvil: 1", "a\nb", "a\x00b"])
async def test_a_header_value_cannot_smuggle_another_header(
    gateway: DirectGateway, value: str
) -> None:
    async with raw_server(answering(reply(b"ok"))) as server:
        outcome = await gateway.scrape(a_request(server.url(), headers={"X": value}))

    assert isinstance(outcome, NotScraped)
    assert server.connections == 0


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (304, FailureReason.BAD_TARGET, False),
        (400, FailureReason.BAD_TARGET, False),
        (401, FailureReason.BLOCKED, True),
        (403, FailureReason.BLOCKED, True),
        (404, FailureReason.BAD_TARGET, False),
        (408, FailureReason.TIMEOUT, True),
        (410, FailureReason.BAD_TARGET, False),
        (429, FailureReason.RATE_LIMITED, True),
        (451, FailureReason.BLOCKED, True),
        (500, FailureReason.GATEWAY_ERROR, True),
        (503, FailureReason.GATEWAY_ERROR, True),
        (999, FailureReason.GATEWAY_ERROR, True),
    ],
)
async def test_an_error_status_is_a_failure_with_a_reason(
    gateway: DirectGateway, status: int, reason: FailureReason, retryable: bool
) -> None:
    async with raw_server(answering(reply(b"sorry", f"{status} No"))) as server:
        outcome = await gateway.scrape(a_request(server.url("/?token=CANARY")))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (reason, retryable)
    assert outcome.problem.status == status
    assert outcome.problem.type == f"urn:conveyor:problem:{outcome.problem.code}"
    assert "CANARY" not in repr(outcome)


@pytest.mark.parametrize("status", [404, 500, 302])
async def test_an_allowed_status_is_a_page(gateway: DirectGateway, status: int) -> None:
    params = {"allowed_status_codes": "404, 500,302,x", "original_status": "true"}
    async with raw_server(answering(reply(b"page", f"{status} No"))) as server:
        outcome = await gateway.scrape(a_request(server.url(), params=params))

    assert isinstance(outcome, Scraped)
    assert (outcome.status, outcome.body) == (status, b"page")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("999999999", 3600.0),
        ("9" * 5000, 3600.0),
        ("-1", None),
        ("soon", None),
        ("", None),
        (formatdate(NOW + 60, usegmt=True), 60.0),
        (formatdate(NOW - 60, usegmt=True), 0.0),
        ("Fri, 99 Foo 2099 00:00:00 GMT", None),
    ],
)
async def test_a_retry_after_is_followed_within_limits(
    gateway: DirectGateway, value: str, seconds: float | None
) -> None:
    answer = reply(b"", "429 Slow down", {"Retry-After": value})
    async with raw_server(answering(answer)) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, NotScraped)
    assert outcome.retry_after_s == seconds


@pytest.mark.parametrize(
    "params",
    [{"js_render": "true"}, {"css_extractor": "{}"}, {"proxy_country": "us", "mode": "auto"}],
)
async def test_a_parameter_that_would_change_the_result_is_not_ignored(
    gateway: DirectGateway, params: dict[str, str]
) -> None:
    async with raw_server(answering(reply(b"ok"))) as server:
        outcome = await gateway.scrape(a_request(server.url(), params=params))

    assert isinstance(outcome, NotScraped)
    assert outcome.problem.code == "unsupported_param"
    assert (outcome.reason, outcome.retryable) == (FailureReason.OTHER, False)
    assert server.connections == 0


async def test_parameters_that_ask_for_nothing_special_are_honoured(gateway: DirectGateway) -> None:
    params = {"original_status": "true", "allowed_status_codes": "404", "js_render": "false"}
    async with raw_server(answering(reply(b"ok"))) as server:
        outcome = await gateway.scrape(a_request(server.url(), params=params))

    assert isinstance(outcome, Scraped)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.1/", "malformed_url"),
        ("file:///etc/passwd", "unsupported_scheme"),
        ("http:///x", "missing_host"),
        ("http://example.com/" + "a" * 3000, "url_too_long"),
    ],
)
async def test_a_bad_url_fails_the_task(gateway: DirectGateway, url: str, code: str) -> None:
    outcome = await gateway.scrape(a_request(url))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.problem.code) == (FailureReason.BAD_TARGET, code)
    assert not outcome.retryable


@pytest.mark.parametrize(
    ("code", "retryable"), [(socket.EAI_NONAME, False), (socket.EAI_AGAIN, True)]
)
async def test_a_name_without_an_address_is_a_bad_target(code: int, retryable: bool) -> None:
    async def lookup(_host: str) -> Sequence[str]:
        raise socket.gaierror(code, "no")

    gateway = DirectGateway(HttpPool(TargetPolicy(), lookup=lookup, tls=TLS), now=now)
    outcome = await gateway.scrape(a_request("http://example.com/"))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (FailureReason.BAD_TARGET, retryable)


async def test_private_targets_are_forbidden_unless_allowed() -> None:
    gateway = DirectGateway(HttpPool(TargetPolicy(), tls=TLS), now=now)
    async with raw_server(answering(reply(b"secret"))) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, NotScraped)
    assert outcome.problem.code == "forbidden_target"
    assert server.connections == 0


async def test_a_refused_connection_is_a_retryable_failure(gateway: DirectGateway) -> None:
    async with raw_server(answering(reply())) as server:
        url = server.url()
    outcome = await gateway.scrape(a_request(url))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (FailureReason.GATEWAY_ERROR, True)
    assert outcome.problem.code == "connect_failed"


@pytest.mark.parametrize(
    ("answer", "code", "reason", "retryable"),
    [
        (b"nonsense\r\n\r\n", "bad_response", FailureReason.GATEWAY_ERROR, True),
        (b"", "connection_lost", FailureReason.GATEWAY_ERROR, True),
        (reply(os.urandom(2_000_000)), "body_too_large", FailureReason.BAD_TARGET, False),
        (
            reply(b"plain", headers={"Content-Encoding": "gzip"}),
            "undecodable_body",
            FailureReason.BAD_TARGET,
            False,
        ),
        (
            reply(gzip.compress(bytes(5_000_000)), headers={"Content-Encoding": "gzip"}),
            "body_too_large",
            FailureReason.BAD_TARGET,
            False,
        ),
    ],
)
async def test_an_answer_that_cannot_be_kept_is_a_failure_and_no_exception(
    gateway: DirectGateway, answer: bytes, code: str, reason: FailureReason, retryable: bool
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)

    async with raw_server(handler) as server:
        outcome = await gateway.scrape(a_request(server.url()))

    assert isinstance(outcome, NotScraped)
    assert (outcome.problem.code, outcome.reason) == (code, reason)
    assert outcome.retryable is retryable


async def test_no_cookie_is_kept_between_requests(gateway: DirectGateway) -> None:
    answer = reply(b"ok", headers={"Set-Cookie": "session=CANARY"})
    async with raw_server(answering(answer)) as server:
        await gateway.scrape(a_request(server.url()))
        await gateway.scrape(a_request(server.url()))

    assert b"CANARY" not in server.requests[1]
