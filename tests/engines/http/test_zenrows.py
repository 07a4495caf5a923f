"""ZenrowsGateway: the query it sends, and how each answer is interpreted."""

from __future__ import annotations

import json
from urllib.parse import parse_qs

import pytest

from conveyor.domain.budget import Price
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import FailureReason, Method, RunFailure
from conveyor.engines.http.zenrows import ZenrowsGateway
from conveyor.http_client.pool import HttpPool
from conveyor.ports.gateway import (
    Contact,
    GatewayReport,
    NotScraped,
    Outcome,
    Scraped,
    ScrapeRequest,
)
from tests.engines.http.conftest import a_request, now
from tests.http_client.server import RawServer, answering, raw_server, reply

TARGET = "https://shop.example.com/a?b=c&d=é"


def gateway_to(pool: HttpPool, server: RawServer, path: str = "/v1/") -> ZenrowsGateway:
    return ZenrowsGateway(pool, server.url(path), now=now)


async def scrape(pool: HttpPool, answer: bytes, request: ScrapeRequest | None = None) -> Outcome:
    async with raw_server(answering(answer)) as server:
        return await gateway_to(pool, server).scrape(request or a_request(TARGET, auth="CANARY"))


def error(status: int, code: str = "") -> bytes:
    body = b'{"code":"%b","title":"t","status":%d,"type":"x"}' % (code.encode(), status)
    return reply(body, f"{status} No", {"Content-Type": "application/problem+json"})


async def test_the_query_contains_target_key_and_parameters(pool: HttpPool) -> None:
    request = a_request(TARGET, auth="KEY", params={"js_render": "true", "wait": "5"})
    async with raw_server(answering(reply(b"page"))) as server:
        outcome = await gateway_to(pool, server).scrape(request)

    assert isinstance(outcome, Scraped)
    path = server.requests[0].split(b" ")[1].decode()
    assert path.startswith("/v1/?")
    assert parse_qs(path.partition("?")[2]) == {
        "url": [TARGET],
        "apikey": ["KEY"],
        "js_render": ["true"],
        "wait": ["5"],
    }


async def test_an_endpoint_url_may_have_a_query_of_its_own(pool: HttpPool) -> None:
    async with raw_server(answering(reply(b"page"))) as server:
        await gateway_to(pool, server, "/v1/?pool=a").scrape(a_request(TARGET))

    assert server.requests[0].startswith(b"GET /v1/?pool=a&url=")


async def test_a_parameter_cannot_replace_the_target_or_the_key(pool: HttpPool) -> None:
    request = a_request(TARGET, auth="KEY", params={"url": "http://evil/", "apikey": "other"})
    async with raw_server(answering(reply(b"page"))) as server:
        await gateway_to(pool, server).scrape(request)

    query = parse_qs(server.requests[0].split(b" ")[1].decode().partition("?")[2])
    assert (query["url"], query["apikey"]) == ([TARGET], ["KEY"])


async def test_conditions_are_checked_by_the_client_and_a_page_that_fails_them_keeps_its_cost(
    pool: HttpPool,
) -> None:
    request = a_request(TARGET, params={"must_contain": "price", "must_match": "x", "wait": "5"})
    answer = reply(b"page", headers={"X-Request-Cost": "0.002", "X-Request-Credits": "5"})
    async with raw_server(answering(answer)) as server:
        outcome = await gateway_to(pool, server).scrape(request)

    query = parse_qs(server.requests[0].split(b" ")[1].decode().partition("?")[2])
    assert query == {"url": [TARGET], "wait": ["5"]}
    assert isinstance(outcome, NotScraped)
    assert (outcome.problem.code, outcome.retryable) == ("must_contain_not_met", True)
    assert (outcome.credits, outcome.cost_micros, outcome.cost_known) == (5, 2000, True)


async def test_custom_headers_and_a_post_body_are_passed_on(pool: HttpPool) -> None:
    request = a_request(
        TARGET,
        method=Method.POST,
        headers={"Referer": "https://r.example/"},
        body=b"q=1",
        body_content_type="application/x-www-form-urlencoded",
    )
    async with raw_server(answering(reply(b"page"))) as server:
        await gateway_to(pool, server).scrape(request)

    sent = server.requests[0]
    assert sent.startswith(b"POST /v1/?")
    assert b"custom_headers=true" in sent
    assert b"\r\nReferer: https://r.example/\r\n" in sent
    assert b"\r\nContent-Type: application/x-www-form-urlencoded\r\n" in sent
    assert sent.endswith(b"\r\n\r\nq=1")


@pytest.mark.parametrize(
    ("headers", "cost_micros", "spent"),
    [
        ({"X-Request-Cost": "0.001"}, 1000, 5),
        ({"X-Request-Cost": "0.0000014", "X-Request-Credits": "25"}, 2, 25),
        ({"X-Request-Cost": "0", "X-Request-Credits": "0"}, 0, 0),
        ({"X-Request-Cost": "nan"}, None, 5),
        ({"X-Request-Cost": "-1"}, None, 5),
        ({"X-Request-Cost": "1e999"}, None, 5),
        ({"X-Request-Cost": "free", "X-Request-Credits": "many"}, None, 5),
        ({}, None, 5),
    ],
)
async def test_the_cost_of_a_page_is_that_of_the_answer_or_else_its_price(
    pool: HttpPool, headers: dict[str, str], cost_micros: int | None, spent: int
) -> None:
    request = a_request(TARGET, params={"js_render": "true"})
    outcome = await scrape(pool, reply(b"page", headers=headers), request)

    assert isinstance(outcome, Scraped)
    assert (outcome.cost_micros if outcome.cost_known else None) == cost_micros
    assert outcome.credits == spent


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, 1),
        ({"js_render": "false"}, 1),
        ({"js_render": "True"}, 5),
        ({"premium_proxy": "true"}, 10),
        ({"premium_proxy": "true", "js_render": "true"}, 25),
        ({"mode": "auto"}, 25),
    ],
)
def test_a_call_has_the_price_of_its_parameters(
    pool: HttpPool, params: dict[str, str], expected: int
) -> None:
    url = "https://gateway.example.com/v1/"
    priced = ZenrowsGateway(pool, url, now=now, credit_micros=276)

    assert priced.price(params) == Price(expected, 276 * expected)
    assert ZenrowsGateway(pool, url, now=now).price(params) == Price(expected, None)


async def test_a_failure_without_a_stated_cost_is_free(pool: HttpPool) -> None:
    outcome = await scrape(pool, error(422))

    assert isinstance(outcome, NotScraped)
    assert (outcome.credits, outcome.cost_micros, outcome.cost_known) == (0, 0, True)


async def test_a_call_without_an_answer_may_have_cost_its_price(
    pool: HttpPool,
) -> None:
    outcome = await scrape(pool, b"")

    assert isinstance(outcome, NotScraped)
    assert outcome.cost_known is False


async def test_the_cost_of_a_failure_is_recorded(pool: HttpPool) -> None:
    outcome = await scrape(pool, reply(b"", "404 No", {"X-Request-Cost": "0.5"}))

    assert isinstance(outcome, NotScraped)
    assert outcome.cost_micros == 500_000


PLAN = {"Concurrency-Limit": "200", "Concurrency-Remaining": "199"}
FULL = {"Concurrency-Limit": "20", "Concurrency-Remaining": "0"}
AUTH006 = b'{"code":"AUTH006"}'
TOLD = b'{"code":"X1","title":"The concurrency of your plan is used up","detail":{"a":1}}'


@pytest.mark.parametrize(
    ("response", "report"),
    [
        (reply(b"page"), (Contact.ANSWERED, None, None)),
        (reply(b"page", headers=PLAN), (Contact.ANSWERED, 200, 199)),
        (reply(b"", "404 No", PLAN), (Contact.ANSWERED, 200, 199)),
        (reply(AUTH006, "429 No", FULL), (Contact.REFUSED, 20, 0)),
        (reply(AUTH006, "429 No"), (Contact.REFUSED, None, None)),
        (reply(TOLD, "429 No"), (Contact.REFUSED, None, None)),
        (reply(b"busy", "429 No", FULL), (Contact.REFUSED, 20, 0)),
        (reply(b"busy", "429 No", {"Concurrency-Limit": "20"}), (Contact.REFUSED, 20, None)),
        # The following answers are the site's own 429, which the gateway passes on.
        (reply(b"busy", "429 No"), (Contact.ANSWERED, None, None)),
        (reply(b"busy", "429 No", PLAN), (Contact.ANSWERED, 200, 199)),
        (reply(b'{"code":"RESP429"}', "429 No", FULL), (Contact.ANSWERED, 20, 0)),
        (reply(b"away", "503 No"), (Contact.FAILED, None, None)),
        (reply(b'{"code":"ERR000"}', "500 No"), (Contact.FAILED, None, None)),
        (reply(b'{"code":"CTX0002"}', "504 No"), (Contact.ANSWERED, None, None)),
        (reply(b'{"code":"RESP001"}', "502 No"), (Contact.ANSWERED, None, None)),
    ],
)
async def test_an_answer_shows_whether_the_gateway_works_and_its_call_limit(
    pool: HttpPool, response: bytes, report: tuple[Contact, int | None, int | None]
) -> None:
    gateway_report = (await scrape(pool, response)).report  # type: ignore[union-attr]

    assert gateway_report is not None
    assert (gateway_report.contact, gateway_report.limit, gateway_report.remaining) == report


@pytest.mark.parametrize("number", ["-1", "", "1e9", "9" * 30, "20.5", "\u0661"])
async def test_a_limit_that_is_no_number_is_ignored(pool: HttpPool, number: str) -> None:
    headers = {"Concurrency-Limit": number, "Concurrency-Remaining": number}
    gateway_report = (await scrape(pool, reply(b"page", headers=headers))).report  # type: ignore[union-attr]

    assert gateway_report is not None
    assert (gateway_report.limit, gateway_report.remaining) == (None, None)


async def test_an_implausible_number_of_credits_is_ignored(pool: HttpPool) -> None:
    outcome = await scrape(pool, reply(b"page", headers={"X-Request-Credits": "999999999999"}))

    assert isinstance(outcome, Scraped)
    assert outcome.credits == 1


async def test_an_implausible_amount_of_money_is_ignored(pool: HttpPool) -> None:
    outcome = await scrape(pool, reply(b"page", headers={"X-Request-Cost": "99999999"}))

    assert isinstance(outcome, Scraped)
    assert (outcome.cost_micros, outcome.cost_known) == (0, False)


async def test_an_unreachable_gateway_is_distinguished_from_one_that_does_not_answer(
    pool: HttpPool,
) -> None:
    async with raw_server(answering(b"")) as server:
        gateway = gateway_to(pool, server)
        lost = await gateway.scrape(a_request(TARGET))
    unreachable = await gateway.scrape(a_request(TARGET))

    assert isinstance(lost, NotScraped)
    assert isinstance(unreachable, NotScraped)
    assert lost.report == GatewayReport(contact=Contact.FAILED)
    assert unreachable.report == GatewayReport(contact=Contact.UNREACHABLE)


async def test_a_key_in_the_configured_gateway_url_is_the_only_one_that_is_sent(
    pool: HttpPool,
) -> None:
    async with raw_server(answering(reply(b"page"))) as server:
        gateway = gateway_to(pool, server, "/v1/?apikey=operator")
        await gateway.scrape(a_request(TARGET, auth="caller"))

    assert b"apikey=operator" in server.requests[0]
    assert b"caller" not in server.requests[0]


@pytest.mark.parametrize(
    ("status", "code", "reason", "retryable", "run_failure"),
    [
        (400, "REQS004", FailureReason.OTHER, False, None),
        (401, "AUTH002", FailureReason.AUTH_FAILED, False, None),
        (403, "AUTH009", FailureReason.AUTH_FAILED, False, None),
        (402, "AUTH004", FailureReason.AUTH_FAILED, False, RunFailure.INSUFFICIENT_CREDITS),
        (402, "AUTH005", FailureReason.AUTH_FAILED, False, RunFailure.SUBSCRIPTION_INACTIVE),
        (402, "AUTH010", FailureReason.AUTH_FAILED, False, None),
        (402, "AUTH011", FailureReason.AUTH_FAILED, False, RunFailure.SUBSCRIPTION_INACTIVE),
        (402, "AUTH012", FailureReason.AUTH_FAILED, False, RunFailure.SUBSCRIPTION_INACTIVE),
        (402, "", FailureReason.AUTH_FAILED, False, RunFailure.INSUFFICIENT_CREDITS),
        (402, "NEW999", FailureReason.AUTH_FAILED, False, RunFailure.INSUFFICIENT_CREDITS),
        (
            403,
            "api_key_cap_reached",
            FailureReason.AUTH_FAILED,
            False,
            RunFailure.API_KEY_CAP_REACHED,
        ),
        (404, "RESP002", FailureReason.BAD_TARGET, False, None),
        (410, "", FailureReason.BAD_TARGET, False, None),
        (413, "RESP003", FailureReason.BAD_TARGET, False, None),
        (422, "RESP001", FailureReason.BLOCKED, True, None),
        (429, "AUTH006", FailureReason.RATE_LIMITED, True, None),
        (429, "AUTH008", FailureReason.RATE_LIMITED, True, None),
        (500, "ERR0001", FailureReason.GATEWAY_ERROR, True, None),
        (502, "", FailureReason.GATEWAY_ERROR, True, None),
        (504, "CTX0002", FailureReason.TIMEOUT, True, None),
    ],
)
async def test_each_error_has_a_reason(
    pool: HttpPool,
    status: int,
    code: str,
    reason: FailureReason,
    retryable: bool,
    run_failure: RunFailure | None,
) -> None:
    outcome = await scrape(pool, error(status, code))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (reason, retryable)
    assert outcome.run_failure is run_failure
    assert outcome.problem.code == (code or f"gateway_{status}")
    assert "CANARY" not in repr(outcome)


@pytest.mark.parametrize(
    ("kind", "detail", "expected"),
    [
        ("urn:conveyor:fetch:RESP001", "wait_for: no match", "wait_for: no match"),
        ("urn:conveyor:fetch:RESP001", "x" * 900, "x" * 500),
        ("urn:conveyor:fetch:RESP001", "two\nlines", "the gateway answered with status 422"),
        ("https://docs.example/RESP001", "CANARY", "the gateway answered with status 422"),
    ],
)
async def test_the_failure_text_is_passed_on_from_a_conveyor_gateway_only(
    pool: HttpPool, kind: str, detail: str, expected: str
) -> None:
    body = json.dumps({"code": "RESP001", "type": kind, "detail": detail}).encode()

    outcome = await scrape(pool, reply(body, "422 No"))

    assert isinstance(outcome, NotScraped)
    assert (outcome.problem.code, outcome.problem.detail) == ("RESP001", expected)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"not json", b"[]", b'{"code":7}', b'{"code":"<b>\\n"}', b"\xff", b"{" * 70_000),
        b'{"title":' + b"[" * 5_000,
        b'{"code":"BLK0001","pad":"%b"}' % (b"x" * 20_000),
    ],
)
async def test_an_error_with_an_invalid_explanation_is_classified_by_its_status(
    pool: HttpPool, body: bytes
) -> None:
    outcome = await scrape(pool, reply(body, "422 No"))

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.problem.code) == (FailureReason.BLOCKED, "gateway_422")


async def test_a_page_is_never_read_as_a_problem(pool: HttpPool) -> None:
    page = b'{"code":"AUTH004","title":' + b"[" * 50_000

    outcome = await scrape(pool, reply(page, headers={"X-Request-Credits": "3"}))

    assert isinstance(outcome, Scraped)
    assert (outcome.body, outcome.credits) == (page, 3)


async def test_a_concurrency_error_returns_its_retry_delay(pool: HttpPool) -> None:
    outcome = await scrape(pool, reply(b"", "429 No", {"Retry-After": "7"}))

    assert isinstance(outcome, NotScraped)
    assert outcome.retry_after_s == 7.0


async def test_an_allowed_status_is_a_page(pool: HttpPool) -> None:
    request = a_request(TARGET, params={"allowed_status_codes": "404"})
    outcome = await scrape(pool, reply(b"page", "404 No"), request)

    assert isinstance(outcome, Scraped)
    assert (outcome.status, outcome.body) == (404, b"page")


async def test_an_unreachable_gateway_is_a_retryable_failure_that_contains_no_key(
    pool: HttpPool,
) -> None:
    async with raw_server(answering(reply())) as server:
        gateway = gateway_to(pool, server)
    outcome = await gateway.scrape(a_request(TARGET, auth="CANARY"))

    assert isinstance(outcome, NotScraped)
    assert outcome.problem.code == "gateway_unreachable"
    assert outcome.cost_known is True
    assert (outcome.reason, outcome.retryable) == (FailureReason.GATEWAY_ERROR, True)
    assert "CANARY" not in repr(outcome) + repr(gateway) + repr(vars(gateway))


async def test_an_invalid_key_cannot_break_out_of_the_request_line(pool: HttpPool) -> None:
    request = a_request(TARGET, auth="a b\r\nX: y&url=http://evil/")
    async with raw_server(answering(reply(b"page"))) as server:
        await gateway_to(pool, server).scrape(request)

    assert b"\r\nX: y" not in server.requests[0]
    assert server.requests[0].count(b"url=") == 1


async def test_an_invalid_gateway_url_is_refused_at_once(pool: HttpPool) -> None:
    with pytest.raises(InvalidArgument):
        ZenrowsGateway(pool, "gateway.local/v1", now=now)
