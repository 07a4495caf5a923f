"""Direct fetches with a processor: each parameter about content, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from conveyor.domain.model import FailureReason
from conveyor.domain.submit.scraper_params import DIRECT_PARAMS, PARAMS
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.http.direct import DirectGateway
from conveyor.gateway.content import ContentProcessor, direct_support, open_processor
from conveyor.http_client.pool import HttpPool
from conveyor.ports.gateway import NotScraped, Outcome, Scraped
from tests.engines.http.conftest import TLS, a_request, now
from tests.gateway.recorded import CONTENT, NO_CONTENT, Recorded
from tests.http_client.server import answering, raw_server, reply

PAGE = b"<title>Mug</title><h1>Blue mug</h1><a href='/x'>More</a><p>mail@shop.example</p>"


@pytest.fixture
def processor() -> Iterator[ContentProcessor]:
    with open_processor(ThreadExecutor(2)) as processor:
        yield processor


@pytest.fixture
async def gateway(processor: ContentProcessor) -> AsyncIterator[DirectGateway]:
    pool = HttpPool(TargetPolicy(allow_private=True), tls=TLS)
    yield DirectGateway(pool, now=now, processor=processor)
    pool.close()


async def fetch(
    gateway: DirectGateway,
    params: dict[str, str],
    body: bytes = PAGE,
    *,
    status: str = "200 OK",
    headers: dict[str, str] | None = None,
) -> Outcome:
    sent = {"Content-Type": "text/html; charset=utf-8", **(headers or {})}
    async with raw_server(answering(reply(body, status, sent))) as server:
        return await gateway.scrape(a_request(server.url(), params=params, deadline_s=120.0))


@pytest.mark.parametrize(
    ("params", "content_type", "body"),
    [
        ({}, "text/html; charset=utf-8", PAGE),
        ({"css_extractor": '{"links":"a @href"}'}, "application/json", b'{"links":"/x"}'),
        ({"css_extractor": ""}, "text/html; charset=utf-8", PAGE),
        ({"autoparse": "false"}, "text/html; charset=utf-8", PAGE),
        ({"autoparse": "true"}, "application/json", b'{"title":"Mug"}'),
        ({"outputs": "emails"}, "application/json", b'{"emails":["mail@shop.example"]}'),
        (
            {"response_type": "markdown"},
            "text/markdown; charset=utf-8",
            b"# Blue mug\n\n[More](/x)\n\nmail@shop.example\n",
        ),
        (
            {"response_type": "plaintext"},
            "text/plain; charset=utf-8",
            b"Mug\n\nBlue mug\n\nMore\n\nmail@shop.example\n",
        ),
        ({"must_contain": "Blue"}, "text/html; charset=utf-8", PAGE),
        ({"must_match": "(?i)BLUE"}, "text/html; charset=utf-8", PAGE),
        ({"min_bytes": "10"}, "text/html; charset=utf-8", PAGE),
        (
            {"must_contain": "<h1>", "css_extractor": '{"title":"h1"}'},
            "application/json",
            b'{"title":"Blue mug"}',
        ),
    ],
)
async def test_a_plain_page_becomes_what_the_parameters_ask_for(
    gateway: DirectGateway, params: dict[str, str], content_type: str, body: bytes
) -> None:
    outcome = await fetch(gateway, params)

    assert outcome == Scraped(status=200, content_type=content_type, body=body)


@pytest.mark.parametrize("key", sorted(PARAMS))
async def test_each_parameter_is_honoured_or_refused(gateway: DirectGateway, key: str) -> None:
    values = {
        "css_extractor": '{"a":"h1"}',
        "min_bytes": "1",
        "outputs": "links",
        "response_type": "markdown",
    }
    value = values.get(key, "true")
    outcome = await fetch(gateway, {key: value, "must_match": "." if key == "must_match" else ""})

    if key in {name.partition("=")[0] for name in DIRECT_PARAMS}:
        code = outcome.problem.code if isinstance(outcome, NotScraped) else None
        assert code in {None, "must_contain_not_met"}
    else:
        assert isinstance(outcome, NotScraped)
        assert outcome.problem.code == "unsupported_param"


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"must_contain": "green"}, "must_contain_not_met"),
        ({"must_match": r"^\d+$"}, "must_match_not_met"),
        ({"min_bytes": "1000"}, "min_bytes_not_met"),
        ({"must_contain": "green", "outputs": "links"}, "must_contain_not_met"),
    ],
)
async def test_a_page_that_does_not_meet_a_condition_is_retried_as_blocked(
    gateway: DirectGateway, params: dict[str, str], code: str
) -> None:
    outcome = await fetch(gateway, params)

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.retryable) == (FailureReason.BLOCKED, True)
    assert outcome.problem.code == code


async def test_conditions_of_a_large_page_are_checked_too(gateway: DirectGateway) -> None:
    large = PAGE + b"<p>filler</p>" * 20_000 + b"end"

    met = await fetch(gateway, {"must_contain": "</p>end"}, large)
    unmet = await fetch(gateway, {"must_contain": "no such text"}, large)

    assert isinstance(met, Scraped)
    assert isinstance(unmet, NotScraped)


async def test_an_answer_with_an_error_status_fails_by_its_status_whatever_its_body_says(
    gateway: DirectGateway,
) -> None:
    """How much of such a body has arrived depends on the network, so it cannot count."""
    page = recorded("bare 404 with a status of success").to_page().body

    outcome = await fetch(gateway, {}, page, status="404 Not Found")

    assert isinstance(outcome, NotScraped)
    assert outcome.problem.code == "target_404"


def recorded(name: str) -> Recorded:
    return next(page for page in (*NO_CONTENT, *CONTENT) if page.name == name)


@pytest.mark.parametrize(
    ("name", "reason", "code", "retryable"),
    [
        ("robot check", FailureReason.BLOCKED, "page_challenge", True),
        ("too many requests", FailureReason.BLOCKED, "page_blocked", True),
        ("cookie wall", FailureReason.BLOCKED, "page_consent", True),
        ("bare 404", FailureReason.BAD_TARGET, "page_soft_404", False),
        ("react shell", FailureReason.OTHER, "page_shell", False),
    ],
)
async def test_an_answer_without_content_is_no_success(
    gateway: DirectGateway, name: str, reason: FailureReason, code: str, retryable: bool
) -> None:
    full = {
        "robot check": "recaptcha and nothing else",
        "too many requests": "too many requests with a status of success",
        "cookie wall": "cookie wall of a small site",
        "bare 404": "bare 404 with a status of success",
    }.get(name, name)
    body = recorded(full).to_page().body

    outcome = await fetch(gateway, {}, body)
    wanted = await fetch(gateway, {"allowed_status_codes": "404, 200"}, body)

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.problem.code) == (reason, code)
    assert outcome.retryable is retryable
    assert isinstance(wanted, Scraped)


async def test_a_challenge_is_recognised_by_its_headers_whatever_its_status(
    gateway: DirectGateway,
) -> None:
    headers = {"CF-Mitigated": "challenge"}
    outcome = await fetch(gateway, {}, b"", status="503 Service Unavailable", headers=headers)

    assert isinstance(outcome, NotScraped)
    assert (outcome.reason, outcome.problem.code) == (FailureReason.BLOCKED, "page_challenge")


async def test_nothing_is_extracted_from_a_file(gateway: DirectGateway) -> None:
    headers = {"Content-Type": "application/pdf"}
    outcome = await fetch(gateway, {"outputs": "links"}, b"%PDF-1.7", headers=headers)

    assert isinstance(outcome, NotScraped)
    assert outcome.problem.code == "not_html"
    assert not outcome.retryable


def test_what_is_installed_decides_what_is_accepted() -> None:
    assert direct_support().honoured == frozenset(DIRECT_PARAMS)
