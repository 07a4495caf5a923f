"""DirectGateway: fetches pages itself, and checks every redirect
(docs/engines.md, Gateways).

Callers share nothing: no cookie, no credential, no cache of answers. The gateway follows a redirect
from https to http, because many sites have such redirects. It parses, resolves and checks each hop
like the first. The caller's headers and body are sent only to the origin that they were meant for:
any of them may be a credential, and the gateway cannot know which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec
import trio

from conveyor.domain.budget import Price
from conveyor.domain.model import FailureReason
from conveyor.domain.submit.scraper_params import DIRECT_SUPPORT
from conveyor.domain.submit.target import BadUrl, Target, join, parse_url
from conveyor.engines.http.failure_mapping import (
    content_type_of,
    not_scraped,
    outcome_of,
    parse_retry_after,
)
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.exchange import Request, Response
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.response_body import ACCEPT_ENCODING
from conveyor.ports.gateway import NotScraped, Outcome, Scraped, ScrapeRequest

USER_AGENT = "conveyor/0.1"
# A loop of redirects ends here. All hops share one deadline.
REDIRECTS_MAX = 5
# A site cannot delay a retry for longer.
RETRY_AFTER_S_MAX = 3600.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Headers that are sent to another origin too: a browser sends them to every site, so they contain
# no secret.
_PUBLIC = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-language"})
# Hop-by-hop and framing headers. The HTTP client sets them; a caller's value could break the
# framing of the request.
_DROPPED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_DEFAULTS = (
    ("User-Agent", USER_AGENT),
    ("Accept", "*/*"),
    ("Accept-Encoding", ACCEPT_ENCODING),
)


class _Hop(msgspec.Struct, frozen=True):
    """One request of a chain of redirects."""

    method: str
    target: Target
    headers: tuple[tuple[str, str], ...]
    body: bytes | None


class DirectGateway:
    def __init__(self, pool: HttpPool, *, now: Callable[[], float]) -> None:
        self._pool = pool
        self._now = now

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        # The submit has refused these already, unless another gateway was configured then.
        unsupported = DIRECT_SUPPORT.find_unsupported(request.params)
        if unsupported:
            detail = f"a direct fetch cannot honour {', '.join(unsupported)}"
            return not_scraped(FailureReason.OTHER, 400, "unsupported_param", detail)
        target = parse_url(request.url)
        if isinstance(target, BadUrl):
            return _bad_url(target)
        headers = _headers_for(request)
        try:
            return await self._follow(_Hop(request.method, target, headers, request.body), request)
        except FetchFailed as error:
            return outcome_of(error)

    async def _follow(self, hop: _Hop, request: ScrapeRequest) -> Outcome:
        deadline = trio.current_time() + request.deadline_s
        allowed = allowed_statuses(request.params)

        def wants_body(status: int) -> bool:
            return 200 <= status < 300 or status in allowed

        first = hop.target
        for _ in range(REDIRECTS_MAX + 1):
            response = await self._pool.fetch(
                Request(
                    method=hop.method,
                    target=hop.target,
                    partition=request.partition,
                    headers=hop.headers,
                    body=hop.body,
                    deadline_s=deadline - trio.current_time(),
                    body_bytes_max=request.body_bytes_max,
                    wants_body=wants_body,
                    memory=request.memory,
                )
            )
            if wants_body(response.status):
                return _page_from(response, None if hop.target is first else hop.target.url)
            location = response.header(b"location")
            if response.status not in _REDIRECTS or location is None:
                return self._failure(response)
            target = join(hop.target, location)
            if isinstance(target, BadUrl):
                return _bad_redirect("the redirect leads to something that is not a web address")
            # `join` has parsed the address strictly, and the pool resolves and checks it before it
            # connects. So a redirect cannot reach an address that the first URL could not.
            next_hop = _next_hop(hop, target, response.status)
            if isinstance(next_hop, NotScraped):
                return next_hop
            hop = next_hop
        return _bad_redirect(f"more than {REDIRECTS_MAX} redirects")

    def _failure(self, response: Response) -> NotScraped:
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


def _page_from(response: Response, final_url: str | None) -> Scraped:
    return Scraped(
        status=response.status,
        content_type=content_type_of(response),
        body=response.body,
        final_url=final_url,
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


def forwardable(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the caller's headers without those that would change the framing of the request."""
    return [
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in _DROPPED and not lower.startswith("proxy-")
    ]


def _next_hop(hop: _Hop, target: Target, status: int) -> _Hop | NotScraped:
    # As browsers do: 303 asks for a GET, and 301 and 302 turn a POST into one.
    is_read = hop.method in {"GET", "HEAD"}
    keeps_method = is_read or (status != 303 and (status in {307, 308} or hop.method != "POST"))
    body, headers = hop.body, hop.headers
    if not keeps_method:
        body = None
        headers = tuple(pair for pair in headers if pair[0].lower() not in _OF_THE_BODY)
    if target.origin != hop.target.origin:
        # Sending the body would disclose it, and dropping it would send another request than the
        # caller's. So the task fails.
        if body:
            return _bad_redirect("the redirect would take the request's body to another origin")
        body, headers = None, _public_headers(headers, hop.target, target)
    return _Hop(hop.method if keeps_method else "GET", target, headers, body)


def _public_headers(
    headers: tuple[tuple[str, str], ...], source: Target, target: Target
) -> tuple[tuple[str, str], ...]:
    """Returns the headers that another origin may receive.

    Dropped headers do not return if a later redirect leads to the first origin again: the site in
    between chose the URL of that request.
    """
    public_headers: list[tuple[str, str]] = []
    for name, value in headers:
        if name.lower() in _PUBLIC:
            public_headers.append((name, value))
        elif name.lower() == "referer" and (target.is_tls or not source.is_tls):
            page = parse_url(value)
            if isinstance(page, Target) and (target.is_tls or not page.is_tls):
                # As browsers do: the origin of the page, without path and query.
                public_headers.append((name, f"{page.scheme}://{page.authority}/"))
    return tuple(public_headers)


def _bad_url(bad: BadUrl) -> NotScraped:
    return not_scraped(FailureReason.BAD_TARGET, 400, bad.reason.value, bad.detail)


def _bad_redirect(detail: str) -> NotScraped:
    return not_scraped(FailureReason.BAD_TARGET, 502, "bad_redirect", detail)


_STATUS = re.compile(r"[0-9]{3}\Z")


def allowed_statuses(params: Mapping[str, str]) -> frozenset[int]:
    """Returns the statuses that count as a page, from a list such as `404,500`."""
    text = params.get("allowed_status_codes")
    if not text:
        return frozenset()
    words = (word.strip() for word in text.split(","))
    # Earlier releases stored the text unchecked, so invalid words are ignored.
    return frozenset(int(word) for word in words if _STATUS.match(word))
