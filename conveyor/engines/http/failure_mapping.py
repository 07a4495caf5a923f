"""Failure mapping: translates errors of a fetch to the reason, the code and whether to retry
(docs/engines.md, Gateways).

Details contain only text of this program. No query string, header value or body of a site is ever
quoted, because it may contain a secret.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from conveyor.domain.model import FailureReason, Problem, RunFailure
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.http_client.errors import (
    BadEncoding,
    BadRedirect,
    BadRequest,
    BodyTooLarge,
    ConnectFailed,
    ConnectionLost,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    NoMemoryForBody,
    OutOfResources,
    TimedOut,
    TlsFailed,
    TooSlow,
)
from conveyor.ports.gateway import Deferred, NotScraped

_TITLES = {
    FailureReason.AUTH_FAILED: "Authentication failed",
    FailureReason.BLOCKED: "The target refused the request",
    FailureReason.BAD_TARGET: "The target cannot be scraped",
    FailureReason.RATE_LIMITED: "Too many requests",
    FailureReason.TIMEOUT: "The scrape took too long",
    FailureReason.GATEWAY_ERROR: "The request failed on its way",
    FailureReason.OTHER: "The request cannot be served",
}


def problem(reason: FailureReason, status: int, code: str, detail: str) -> Problem:
    return Problem(
        type=f"urn:conveyor:problem:{code}",
        title=_TITLES[reason],
        status=status,
        code=code,
        detail=detail,
    )


def not_scraped(
    reason: FailureReason,
    status: int,
    code: str,
    detail: str,
    *,
    retryable: bool = False,
    retry_after_s: float | None = None,
    run_failure: RunFailure | None = None,
) -> NotScraped:
    return NotScraped(
        reason=reason,
        problem=problem(reason, status, code, detail),
        retryable=retryable,
        retry_after_s=retry_after_s,
        run_failure=run_failure,
    )


def defer(error: OutOfResources | NoMemoryForBody) -> Deferred:
    """Defers the task: this process was short of something, so the site did not fail."""
    # A call that was sent may have been charged.
    is_free = isinstance(error, OutOfResources)
    return Deferred(reason=WaitReason.RESOURCES, detail=error.detail, cost_known=is_free)


def outcome_of(error: FetchFailed) -> NotScraped | Deferred:
    """Returns the outcome of a direct fetch that got no response."""
    match error:
        case OutOfResources() | NoMemoryForBody():
            return defer(error)
        case TooSlow():
            return not_scraped(FailureReason.TIMEOUT, 504, "too_slow", error.detail, retryable=True)
        case TimedOut():
            return not_scraped(FailureReason.TIMEOUT, 504, "timeout", error.detail, retryable=True)
        case ForbiddenTarget():
            return not_scraped(FailureReason.BAD_TARGET, 403, "forbidden_target", error.detail)
        case BodyTooLarge():
            return not_scraped(FailureReason.BAD_TARGET, 413, "body_too_large", error.detail)
        case BadEncoding():
            return not_scraped(FailureReason.BAD_TARGET, 502, "undecodable_body", error.detail)
        case BadRedirect():
            return not_scraped(FailureReason.BAD_TARGET, 502, "bad_redirect", error.detail)
        case BadRequest():
            return not_scraped(FailureReason.OTHER, 400, "invalid_request", error.detail)
        case NameNotResolved():
            return _dns_outcome(error)
        case _:
            return _transport_outcome(error)


def _dns_outcome(error: NameNotResolved) -> NotScraped:
    return not_scraped(
        FailureReason.BAD_TARGET, 502, "dns_failed", error.detail, retryable=error.is_temporary
    )


def _transport_outcome(error: FetchFailed) -> NotScraped:
    retryable = True
    match error:
        case TlsFailed():
            # A certificate that is not trusted will not be trusted at the next attempt either.
            code, retryable = "tls_failed", not error.is_untrusted
        case ConnectFailed():
            code = "connect_failed"
        case ConnectionLost():
            code = "connection_lost"
        case _:
            code = "bad_response"
    return not_scraped(FailureReason.GATEWAY_ERROR, 502, code, error.detail, retryable=retryable)


# The Retry-After header: seconds or a date, bounded by a maximum.


def parse_retry_after(value: str | None, *, now: float, seconds_max: float) -> float | None:
    """Returns the seconds to wait from `now`, between 0 and `seconds_max`; None if the header is
    missing or invalid."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        # A number with more than 12 digits is a wait of `seconds_max` in any case. Converting
        # thousands of digits would take time.
        return min(float(text[:12]), seconds_max) if len(text) <= 12 else seconds_max
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(at - now, 0.0), seconds_max)
