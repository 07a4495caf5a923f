"""ZenrowsGateway: fetches pages through an endpoint with the ZenRows API
(docs/engines.md, Gateways).

The request has the target as `url`, the caller's key as `apikey` and every scraper parameter in its
query. Custom headers are sent as the request's own headers. The endpoint answers with the page, or
with problem JSON whose `code` states the cause. The key is only in the query: no problem, repr or
log line is ever made from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from conveyor import USER_AGENT
from conveyor.domain.budget import MICROS, Price, micros_from, price_of
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import FailureReason, RunFailure
from conveyor.domain.submit.conditions import CONDITIONS, find_unmet
from conveyor.domain.submit.scraper_params import allowed_statuses
from conveyor.domain.submit.target import Target, parse_url
from conveyor.engines.http.direct import RETRY_AFTER_S_MAX
from conveyor.engines.http.failure_mapping import (
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
    NoMemoryForBody,
    OutOfResources,
    TimedOut,
    TlsFailed,
    TooSlow,
)
from conveyor.http_client.exchange import Request, Response
from conveyor.http_client.pool import HttpPool, forwardable
from conveyor.http_client.response_body import ACCEPT_ENCODING
from conveyor.ports.gateway import (
    OWN_PROBLEMS,
    Contact,
    GatewayReport,
    NotScraped,
    Outcome,
    Scraped,
    ScrapeRequest,
)

# Account-level codes: no task of the run can succeed after one of them. The codes are published at
# docs.zenrows.com/api-error-codes; `api_key_cap_reached` is a code of the batch contract.
_RUN_FAILURES = {
    "AUTH004": RunFailure.INSUFFICIENT_CREDITS,  # Plan usage exceeded.
    "AUTH005": RunFailure.SUBSCRIPTION_INACTIVE,  # The key is past its validity.
    "AUTH011": RunFailure.SUBSCRIPTION_INACTIVE,  # No active subscription.
    "AUTH012": RunFailure.SUBSCRIPTION_INACTIVE,  # The subscription lacks this product.
    "insufficient_credits": RunFailure.INSUFFICIENT_CREDITS,
    "subscription_inactive": RunFailure.SUBSCRIPTION_INACTIVE,
    "api_key_cap_reached": RunFailure.API_KEY_CAP_REACHED,
}
# With these errors the endpoint received no request, so the call certainly cost nothing.
_NEVER_SENT = (
    BadRequest,
    ConnectFailed,
    ConnectTimedOut,
    ForbiddenTarget,
    NameNotResolved,
    TlsFailed,
)
# A feature outside the plan fails the tasks that use it, but not the run.
_FEATURE_NOT_IN_PLAN = "AUTH010"


# The published codes of the account's limits: concurrency, and requests per second.
_LIMIT_CODES = frozenset({"AUTH006", "AUTH008"})
# Codes about the target: no content, blocked, or an operation on it that took too long.
_TARGET_CODES = ("RESP", "BLK", "CTX0002", "REQ")
# No call costs so many credits, or so much money. A larger number is an error of the endpoint, and
# is ignored.
_CREDITS_MAX, _COST_MICROS_MAX = 1_000_000, 1_000 * MICROS
_DETAIL_CHARS_MAX = 500
# A problem is a few hundred bytes. A larger body is a page with an error status, and decoding it
# would block the event loop.
_PROBLEM_BYTES_MAX = 16 * 1024


class _ErrorBody(msgspec.Struct):
    """Title and detail may have any type: only their text is searched."""

    type: Any = ""
    code: str = ""
    title: Any = ""
    detail: Any = ""


class _Spend(msgspec.Struct, frozen=True):
    """Credits and cost in millionths; None where the endpoint does not state them."""

    credits: int | None
    cost_micros: int | None


class ZenrowsGateway:
    """`credit_micros` is the highest cost of a credit. Without it calls have no price in money."""

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
                    memory=request.memory,
                )
            )
        except (OutOfResources, NoMemoryForBody) as error:
            # Before FetchFailed: a shortage of this process says nothing about the endpoint.
            return defer(error)
        except FetchFailed as error:
            return _no_answer(error)
        report = self._report(response)
        # `allowed_status_codes` may contain 429 or 402. An answer about the account is not a page
        # even then.
        is_page = wants_body(response.status) and report.contact is not Contact.REFUSED
        if is_page and not _run_failure(response):
            page = _page_from(response, self.price(request.params))
            answered = msgspec.structs.replace(report, contact=Contact.ANSWERED)
            page = msgspec.structs.replace(page, report=answered)
            unmet = find_unmet(request.params, page.body, page.content_type)
            return page if unmet is None else _unmet_condition(unmet, page)
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
            _detail_of(response),
            retryable=retryable,
            retry_after_s=retry_after_s if retryable else None,
            run_failure=_run_failure(response),
        )
        spent = _spend(response)
        return msgspec.structs.replace(
            failure, credits=spent.credits or 0, cost_micros=spent.cost_micros or 0
        )


def _unmet_condition(condition: str, page: Scraped) -> NotScraped:
    """Returns the failure of a page that the endpoint has charged for."""
    failure = not_scraped(
        FailureReason.BLOCKED,
        422,
        f"{condition}_not_met",
        f"the page does not meet {condition}",
        retryable=True,
    )
    return msgspec.structs.replace(
        failure,
        credits=page.credits,
        cost_micros=page.cost_micros,
        cost_known=page.cost_known,
        report=page.report,
    )


def _contact(response: Response) -> Contact:
    """Returns what an answer means for the endpoint.

    A 429 may be the site's or the account's. The account's has a code or a text about limits, or
    states that no call remains.
    """
    error = _error_of(response)
    if response.status == 429 and _is_about_limit(error, response):
        return Contact.REFUSED
    # A 5xx with a code of the target or of the account proves that the endpoint works.
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
    """Returns the reason of an answer that is not a page, and whether a retry may help."""
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
    """Returns the run failure of an answer. A 402 without a known code means that the credits are
    used up."""
    if response.status < 400:
        return None
    code = _code_of(response)
    if code in _RUN_FAILURES:
        return _RUN_FAILURES[code]
    if response.status == 402 and code != _FEATURE_NOT_IN_PLAN:
        return RunFailure.INSUFFICIENT_CREDITS
    return None


def has_key(endpoint_url: str) -> bool:
    """Returns whether the endpoint's URL contains a key. Then every call uses that key."""
    query = endpoint_url.partition("?")[2]
    return any(name == "apikey" for name, _ in parse_qsl(query, keep_blank_values=True))


def _target_for(endpoint: Target, request: ScrapeRequest) -> Target:
    # `url` and `apikey` come after the parameters, so that no parameter can replace them.
    # The conditions are ours: the endpoint would refuse a parameter that it does not know.
    params = {key: text for key, text in request.params.items() if key not in CONDITIONS}
    query = {**params, "url": request.url}
    if request.headers:
        # Without this parameter the endpoint does not pass the headers to the target.
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


def _page_from(response: Response, price: Price) -> Scraped:
    """Returns the page. A page that does not state its credits counts at its price, because the
    endpoint charges for pages. Failures are free."""
    spent = _spend(response)
    return Scraped(
        status=response.status,
        content_type=response.content_type,
        body=response.body,
        credits=price.credits if spent.credits is None else spent.credits,
        cost_micros=spent.cost_micros or 0,
        cost_known=spent.cost_micros is not None,
    )


def _spend(response: Response) -> _Spend:
    """Returns what the endpoint states that it charged. Invalid numbers are ignored."""
    credit_count = _whole_number(response.header(b"x-request-credits"))
    cost_micros = micros_from(response.header(b"x-request-cost") or "")
    return _Spend(
        None if credit_count is None or credit_count > _CREDITS_MAX else credit_count,
        None if cost_micros is None or cost_micros > _COST_MICROS_MAX else cost_micros,
    )


def _whole_number(text: str | None) -> int | None:
    # The header comes from outside: `int` accepts signs, spaces and digits of other scripts, and
    # takes long for thousands of digits.
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 12:
        return None
    return int(text)


def _code_of(response: Response) -> str:
    """Returns the endpoint's code if it is a plain word, because callers see it in a problem."""
    code = _error_of(response).code
    return code if len(code) <= 64 and code.replace("_", "").isalnum() else ""


def _detail_of(response: Response) -> str:
    """Returns the cause that our own gateway states. What another endpoint writes is not shown: it
    may repeat the key or the page."""
    error = _error_of(response)
    is_own = isinstance(error.type, str) and error.type.startswith(OWN_PROBLEMS)
    if is_own and isinstance(error.detail, str) and error.detail.isprintable():
        return error.detail[:_DETAIL_CHARS_MAX]
    return f"the gateway answered with status {response.status}"


def _error_of(response: Response) -> _ErrorBody:
    """Returns the problem in the answer, or an empty one if the body is not a problem. The body may
    be a site's page: with a good status it is never read as a problem."""
    if response.status < 400 or len(response.body) > _PROBLEM_BYTES_MAX:
        return _ErrorBody()
    try:
        return msgspec.json.decode(response.body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _ErrorBody()


def _no_answer(error: FetchFailed) -> NotScraped:
    """Returns the outcome of a call without an answer. Its cost is unknown unless it was not
    sent."""
    return msgspec.structs.replace(
        _failure_of(error),
        cost_known=isinstance(error, _NEVER_SENT),
        report=_report_on(error),
    )


def _report_on(error: FetchFailed) -> GatewayReport | None:
    match error:
        case BadRequest():
            return None  # The task's headers are invalid; the endpoint was not called.
        case BodyTooLarge() | BadEncoding() | TooSlow():
            # The endpoint sent a response, and the body of the site was the problem.
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
