"""DirectGateway: fetches pages itself, and checks every redirect
(docs/engines.md, Gateways).

Fetches share nothing: no cookie, no credential, no cache of answers. `http_client.pool` checks each
redirect like the first URL, and sends the caller's headers and body only to the origin that they
were meant for. A cookie lasts as long as its chain of redirects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import trio

from conveyor import USER_AGENT
from conveyor.domain.budget import Price
from conveyor.domain.model import FailureReason
from conveyor.domain.submit.scraper_params import GatewaySupport, allowed_statuses
from conveyor.domain.submit.target import BadUrl, Target, parse_url
from conveyor.engines.http.failure_mapping import (
    not_scraped,
    outcome_of,
    parse_retry_after,
)
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.exchange import Request, Response
from conveyor.http_client.pool import Followed, HttpPool, fetch_following, forwardable
from conveyor.http_client.response_body import ACCEPT_ENCODING
from conveyor.ports.gateway import (
    NotScraped,
    Outcome,
    Page,
    PageProcessor,
    Scraped,
    ScrapeRequest,
)

# A site cannot delay a retry for longer.
RETRY_AFTER_S_MAX = 3600.0

_DEFAULTS = (
    ("User-Agent", USER_AGENT),
    ("Accept", "*/*"),
    ("Accept-Encoding", ACCEPT_ENCODING),
)


_UNPROCESSED = GatewaySupport(
    frozenset({"allowed_status_codes", "custom_headers", "original_status"})
)


class DirectGateway:
    """Without a `processor`, every answer with a status of success is a page, and is returned as it
    is."""

    def __init__(
        self,
        pool: HttpPool,
        *,
        now: Callable[[], float],
        processor: PageProcessor | None = None,
    ) -> None:
        self._pool = pool
        self._now = now
        self._processor = processor

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        # The submit has refused these already, unless another gateway was configured then.
        support = self._processor or _UNPROCESSED
        unsupported = support.find_unsupported(request.params)
        if unsupported:
            detail = f"a direct fetch cannot honour {', '.join(unsupported)}"
            return not_scraped(FailureReason.OTHER, 400, "unsupported_param", detail)
        target = parse_url(request.url)
        if isinstance(target, BadUrl):
            return _bad_url(target)
        try:
            return await self._fetch(target, request)
        except FetchFailed as error:
            return outcome_of(error)

    async def _fetch(self, target: Target, request: ScrapeRequest) -> Outcome:
        deadline = trio.current_time() + request.deadline_s
        allowed = allowed_statuses(request.params)

        def wants_body(status: int) -> bool:
            return 200 <= status < 300 or status in allowed

        followed = await fetch_following(
            self._pool,
            Request(
                method=request.method,
                target=target,
                partition=request.partition,
                headers=_headers_for(request),
                body=request.body,
                deadline_s=request.deadline_s,
                body_bytes_max=request.body_bytes_max,
                wants_body=wants_body,
                memory=request.memory,
            ),
        )
        page = _page_from(followed)
        if not wants_body(page.status):
            return self._failure(followed.response, page)
        outcome = await self._process(request, page, deadline - trio.current_time())
        if isinstance(outcome, Scraped) and followed.target is not target:
            return msgspec.structs.replace(outcome, final_url=page.url)
        return outcome

    async def _process(self, request: ScrapeRequest, page: Page, deadline_s: float) -> Outcome:
        if self._processor is not None:
            return await self._processor.process(
                request.params, page, bytes_max=request.body_bytes_max, deadline_s=deadline_s
            )
        return Scraped(status=page.status, content_type=page.content_type, body=page.body)

    def _failure(self, response: Response, page: Page) -> NotScraped:
        # A challenge may have any status, and its headers tell. The body does not count: how much
        # of it has arrived depends on the network.
        if self._processor is not None:
            recognised = self._processor.judge(msgspec.structs.replace(page, body=b""))
            if recognised is not None:
                return recognised
        reason, code, retryable = _judge(response.status)
        retry_after_s = parse_retry_after(
            response.header(b"retry-after"), now=self._now(), seconds_max=RETRY_AFTER_S_MAX
        )
        return not_scraped(
            reason,
            response.status,
            code,
            f"the target answered with status {response.status}",
            retryable=retryable,
            retry_after_s=retry_after_s if retryable else None,
        )


def _judge(status: int) -> tuple[FailureReason, str, bool]:
    """Returns the reason, the code and whether to retry, for a status that is not a page."""
    if status == 429:
        return FailureReason.RATE_LIMITED, "target_rate_limited", True
    if status == 408:
        return FailureReason.TIMEOUT, "target_timeout", True
    if status in {401, 403, 451}:
        return FailureReason.BLOCKED, "target_blocked", True
    if 400 <= status < 500:
        return FailureReason.BAD_TARGET, f"target_{status}", False
    if status >= 500:
        return FailureReason.GATEWAY_ERROR, "target_server_error", True
    return FailureReason.BAD_TARGET, "unexpected_status", False


def _page_from(followed: Followed) -> Page:
    response = followed.response
    return Page(
        url=followed.target.url,
        status=response.status,
        headers={
            name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers
        },
        content_type=response.content_type,
        body=response.body,
    )


def _headers_for(request: ScrapeRequest) -> tuple[tuple[str, str], ...]:
    custom = forwardable(request.headers)
    if not custom and request.body_content_type is None:
        return _DEFAULTS
    named = {name.lower() for name, _ in custom}
    defaults = [pair for pair in _DEFAULTS if pair[0].lower() not in named]
    if request.body_content_type is not None and "content-type" not in named:
        defaults.append(("Content-Type", request.body_content_type))
    return (*defaults, *custom)


def _bad_url(bad: BadUrl) -> NotScraped:
    return not_scraped(FailureReason.BAD_TARGET, 400, bad.reason.value, bad.detail)
