"""ZenrowsGateway: hands the fetch to an endpoint that speaks the ZenRows API
(docs/engines.md, Gateways).

The endpoint takes the target as `url`, the caller's key as `apikey` and every scraper parameter
in its query; custom headers travel as the request's own. It answers with the page, or with
problem JSON whose `code` says what went wrong. The key lives in the query and nowhere else: no
problem, repr or log line is ever made from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from conveyor.domain.backpressure.budget import Price, micros_from, price_of
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import FailureReason, RunFailure
from conveyor.domain.submit.url import Target, parse_url
from conveyor.engines.http.direct import RETRY_AFTER_S_MAX, USER_AGENT, forwardable
from conveyor.engines.http.direct_params import allowed_statuses
from conveyor.engines.http.failure_mapping import (
    content_type_of,
    defer,
    not_scraped,
    parse_retry_after,
)
from conveyor.http_client.errors import (
    BadEncoding,
    BadRequest,
    BodyTooLarge,
    ConnectFailed,
    ConnectTimedOut,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    OutOfResources,
    TimedOut,
    TlsFailed,
    TooSlow,
)
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.request import Request, Response
from conveyor.http_client.response_body import ACCEPT_ENCODING
from conveyor.ports.gateway import (
    Contact,
    GatewayReport,
    NotScraped,
    Outcome,
    Scraped,
    ScrapeRequest,
)

# Account-level codes, after which no task of the run can succeed. Codes as published at
# docs.zenrows.com/api-error-codes; `api_key_cap_reached` is the batch contract's own word.
_RUN_FAILURES = {
    "AUTH004": RunFailure.INSUFFICIENT_CREDITS,  # Plan usage exceeded.
    "AUTH005": RunFailure.SUBSCRIPTION_INACTIVE,  # The key is past its validity.
    "AUTH011": RunFailure.SUBSCRIPTION_INACTIVE,  # No active subscription.
    "AUTH012": RunFailure.SUBSCRIPTION_INACTIVE,  # The subscription lacks this product.
    "insufficient_credits": RunFailure.INSUFFICIENT_CREDITS,
    "subscription_inactive": RunFailure.SUBSCRIPTION_INACTIVE,
    "api_key_cap_reached": RunFailure.API_KEY_CAP_REACHED,
}
_NEVER_SENT = (
    BadRequest,
    ConnectFailed,
    ConnectTimedOut,
    ForbiddenTarget,
    NameNotResolved,
    TlsFailed,
)
# A feature outside the plan fails the tasks that ask for it, not the run.
_FEATURE_NOT_IN_PLAN = "AUTH010"


# Codes of the account's own limits, as published: concurrency, and requests a second.
_LIMIT_CODES = frozenset({"AUTH006", "AUTH008"})
# Codes that speak of the target: no content, blocked, an operation on it that took too long.
_TARGET_CODES = ("RESP", "BLK", "CTX0002", "REQ")
# No call costs so many credits; a larger number is nonsense and counts as silence.
_CREDITS_MAX = 1_000_000


class _ErrorBody(msgspec.Struct):
    """Of title and detail only the words matter, whatever they are."""

    code: str = ""
    title: Any = ""
    detail: Any = ""


class _Spend(msgspec.Struct, frozen=True):
    """Credits, and the cost in millionths, where the endpoint says what it charged."""

    credits: int | None
    cost_micros: int | None


class ZenrowsGateway:
    """`credit_micros` is the most that a credit costs; without it calls have no price in money."""

    def __init__(
        self,
        pool: HttpPool,
        endpoint_url: str,
        *,
        now: Callable[[], float],
        credit_micros: int | None = None,
    ) -> None:
        endpoint = parse_url(endpoint_url)
        if not isinstance(endpoint, Target):
            raise InvalidArgument(f"the gateway's URL is not usable: {endpoint.detail}")
        self._pool = pool
        self._endpoint = endpoint
        self._now = now
        self._credit_micros = credit_micros

    def price(self, params: Mapping[str, str]) -> Price:
        credit_count = price_of(params).credits_max
        micros = self._credit_micros
        return Price(credit_count, None if micros is None else credit_count * micros)

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        allowed = allowed_statuses(request.params)

        def wants_body(status: int) -> bool:
            return 200 <= status < 300 or status in allowed

        try:
            response = await self._pool.fetch(
                Request(
                    method=request.method,
                    target=_target_for(self._endpoint, request),
                    partition=request.partition,
                    headers=_headers_for(request),
                    body=request.body,
                    deadline_s=request.deadline_s,
                    body_bytes_max=request.body_bytes_max,
                    wants_body=wants_body,
                )
            )
        except OutOfResources as error:
            return defer(error)
        except FetchFailed as error:
            return _unanswered(error)
        report = self._report(response)
        is_page = wants_body(response.status) and report.contact is not Contact.REFUSED
        if is_page and not _run_failure(response):
            page = _scraped(response, self.price(request.params))
            answered = msgspec.structs.replace(report, contact=Contact.ANSWERED)
            return msgspec.structs.replace(page, report=answered)
        return msgspec.structs.replace(self._failure(response), report=report)

    def _report(self, response: Response) -> GatewayReport:
        return GatewayReport(
            contact=_contact(response),
            limit=_whole_number(response.header(b"concurrency-limit")),
            remaining=_whole_number(response.header(b"concurrency-remaining")),
            retry_after_s=parse_retry_after(
                response.header(b"retry-after"), now=self._now(), seconds_max=RETRY_AFTER_S_MAX
            ),
        )

    def _failure(self, response: Response) -> NotScraped:
        status, code = response.status, _code_of(response)
        reason, retryable = _judge(status, code)
        retry_after_s = parse_retry_after(
            response.header(b"retry-after"), now=self._now(), seconds_max=RETRY_AFTER_S_MAX
        )
        failure = not_scraped(
            reason,
            status,
            code or f"gateway_{status}",
            f"the gateway answered with status {status}",
            retryable=retryable,
            retry_after_s=retry_after_s if retryable else None,
            run_failure=_run_failure(response),
        )
        spent = _spend(response)
        return msgspec.structs.replace(
            failure, credits=spent.credits or 0, cost_micros=spent.cost_micros or 0
        )


def _contact(response: Response) -> Contact:
    """What an answer says about the endpoint. A 429 that the site gave is told from one of the
    account: that has a code or a text about it, or says that no call remains."""
    error = _error_of(response)
    if response.status == 429 and _is_about_limit(error, response):
        return Contact.REFUSED
    is_explained = error.code.startswith(_TARGET_CODES) or error.code in _RUN_FAILURES
    if response.status >= 500 and not is_explained:
        return Contact.FAILED
    return Contact.ANSWERED


def _is_about_limit(error: _ErrorBody, response: Response) -> bool:
    if error.code in _LIMIT_CODES or "concurren" in f"{error.title} {error.detail}".lower():
        return True
    if error.code.startswith(_TARGET_CODES):
        return False
    remaining = _whole_number(response.header(b"concurrency-remaining"))
    return (
        remaining == 0
        if remaining is not None
        else response.header(b"concurrency-limit") is not None
    )


def _judge(status: int, code: str) -> tuple[FailureReason, bool]:
    """The reason, and whether another try could help, for an answer that is not a page."""
    if status in {401, 402, 403} or code in _RUN_FAILURES:
        return FailureReason.AUTH_FAILED, False
    if status == 429:
        return FailureReason.RATE_LIMITED, True
    if status in {404, 410, 413}:
        return FailureReason.BAD_TARGET, False
    if status in {408, 504}:
        return FailureReason.TIMEOUT, True
    if status == 422:
        return FailureReason.BLOCKED, True
    if status >= 500:
        return FailureReason.GATEWAY_ERROR, True
    return FailureReason.OTHER, False


def _run_failure(response: Response) -> RunFailure | None:
    """Codes first; a 402 that explains itself badly still means that the money is gone."""
    if response.status < 400:
        return None
    code = _code_of(response)
    if code in _RUN_FAILURES:
        return _RUN_FAILURES[code]
    if response.status == 402 and code != _FEATURE_NOT_IN_PLAN:
        return RunFailure.INSUFFICIENT_CREDITS
    return None


def has_key(endpoint_url: str) -> bool:
    """Whether the endpoint's URL has a key of its own: then every call is made with that one."""
    query = endpoint_url.partition("?")[2]
    return any(name == "apikey" for name, _ in parse_qsl(query, keep_blank_values=True))


def _target_for(endpoint: Target, request: ScrapeRequest) -> Target:
    query = {**request.params, "url": request.url}
    if request.headers:
        query["custom_headers"] = "true"
    if request.auth is not None and not has_key(endpoint.path_and_query):
        query["apikey"] = request.auth
    mark = "&" if "?" in endpoint.path_and_query else "?"
    path = f"{endpoint.path_and_query}{mark}{urlencode(query, errors='replace')}"
    return msgspec.structs.replace(endpoint, path_and_query=path)


def _headers_for(request: ScrapeRequest) -> tuple[tuple[str, str], ...]:
    custom = forwardable(request.headers)
    named = {name.lower() for name, _ in custom}
    ours = [("Accept-Encoding", ACCEPT_ENCODING)]
    if "user-agent" not in named:
        ours.append(("User-Agent", USER_AGENT))
    if request.body_content_type is not None and "content-type" not in named:
        ours.append(("Content-Type", request.body_content_type))
    return (*ours, *custom)


def _scraped(response: Response, price: Price) -> Scraped:
    """Pages are charged for, failures are not: a page that does not say counts at its price."""
    spent = _spend(response)
    return Scraped(
        status=response.status,
        content_type=content_type_of(response),
        body=response.body,
        credits=price.credits if spent.credits is None else spent.credits,
        cost_micros=spent.cost_micros or 0,
        cost_known=spent.cost_micros is not None,
    )


def _spend(response: Response) -> _Spend:
    """What the endpoint says it charged; nonsense counts as silence."""
    cost = response.header(b"x-request-cost")
    credit_count = _whole_number(response.header(b"x-request-credits"))
    return _Spend(
        None if credit_count is None or credit_count > _CREDITS_MAX else credit_count,
        None if cost is None else micros_from(cost),
    )


def _whole_number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 12:
        return None
    return int(text)


def _code_of(response: Response) -> str:
    """The endpoint's own code, if it is a plain word: it ends up in a problem."""
    code = _error_of(response).code
    return code if len(code) <= 64 and code.replace("_", "").isalnum() else ""


def _error_of(response: Response) -> _ErrorBody:
    """The problem that the endpoint answered with; an empty one where it is none."""
    try:
        return msgspec.json.decode(response.body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _ErrorBody()


def _unanswered(error: FetchFailed) -> NotScraped:
    """No answer says nothing about the bill, unless nothing was ever sent."""
    return msgspec.structs.replace(
        _failure_of(error),
        cost_known=isinstance(error, _NEVER_SENT),
        report=_report_on(error),
    )


def _report_on(error: FetchFailed) -> GatewayReport | None:
    match error:
        case BadRequest():
            return None  # The task's own headers; the endpoint was not called.
        case BodyTooLarge() | BadEncoding() | TooSlow():
            return GatewayReport(contact=Contact.ANSWERED)
        case _ if isinstance(error, _NEVER_SENT):
            return GatewayReport(contact=Contact.UNREACHABLE)
        case _:
            return GatewayReport(contact=Contact.FAILED)


def _failure_of(error: FetchFailed) -> NotScraped:
    match error:
        case TimedOut():
            return not_scraped(FailureReason.TIMEOUT, 504, "timeout", error.detail, retryable=True)
        case BodyTooLarge():
            return not_scraped(FailureReason.BAD_TARGET, 413, "body_too_large", error.detail)
        case BadRequest():
            return not_scraped(FailureReason.OTHER, 400, "invalid_request", error.detail)
        case _:
            return not_scraped(
                FailureReason.GATEWAY_ERROR,
                502,
                "gateway_unreachable",
                f"the gateway could not be used: {error.detail}",
                retryable=True,
            )
