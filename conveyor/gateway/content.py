"""ContentProcessor: decides whether an answer is a page, and makes the document that the caller
asked for (docs/content.md).

The order: verdicts by rules, then the caller's conditions, then extraction. All three see the page
as the site sent it, or as a browser rendered it. A status that the caller allows explicitly is a
page, whatever it contains: no verdict is made on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from conveyor.domain.errors import make_problem
from conveyor.domain.model import FailureReason
from conveyor.domain.submit.conditions import CONDITIONS, find_unmet
from conveyor.domain.submit.scraper_params import (
    DIRECT_PARAMS,
    OWN_PARAMS,
    PROXY_PARAMS,
    GatewaySupport,
    allowed_statuses,
    find_extracting,
    without_extraction,
)
from conveyor.gateway.extraction.document import NotExtracted, Source, check_selector
from conveyor.gateway.extraction.pool import ExtractionPool, ExtractionTimedOut, is_installed
from conveyor.gateway.verdicts import MEANINGS, Finding, judge
from conveyor.ports.executor import Executor
from conveyor.ports.gateway import NotScraped, Page, Scraped

# Above it, conditions are checked outside the event loop.
_CHECKED_AT_ONCE_BYTES = 64 * 1024
_CONDITION_DETAILS = {
    "min_bytes": "the page has fewer bytes than min_bytes asks for",
    "must_contain": "the page does not contain the text of must_contain",
    "must_match": "the page does not match the pattern of must_match",
}
_STATUS_OF = {"not_html": 415, "too_large": 413, "timeout": 504, "invalid_param_value": 400}


def direct_support() -> GatewaySupport:
    """Returns what direct fetches can do with the packages that are installed."""
    return _support_of(DIRECT_PARAMS)


def own_support(of_proxies: Mapping[str, str]) -> GatewaySupport:
    """Returns the same of `conveyor gateway`, whose proxies honour some parameters."""
    without = {key: words for key, words in OWN_PARAMS.items() if key not in PROXY_PARAMS}
    return _support_of({**without, **of_proxies})


def _support_of(params: Mapping[str, str]) -> GatewaySupport:
    if is_installed():
        return GatewaySupport(frozenset(params), check_selector=check_selector)
    return without_extraction(params)


@contextmanager
def open_processor(executor: Executor) -> Iterator[ContentProcessor]:
    """Opens a processor that extracts in as many processes as there are processors."""
    processor = ContentProcessor(executor, os.cpu_count() or 1)
    try:
        yield processor
    finally:
        processor.close()


class ContentProcessor:
    """`executor` checks conditions of large pages. Close it when no call is running."""

    def __init__(self, executor: Executor, process_count: int) -> None:
        self._executor = executor
        self._support = direct_support()
        self._pool = ExtractionPool(process_count)

    def close(self) -> None:
        self._pool.close()

    def find_unsupported(self, params: Mapping[str, str]) -> list[str]:
        return self._support.find_unsupported(params)

    def judge(self, page: Page) -> NotScraped | None:
        finding = judge(page)
        return None if finding is None else failure_from(finding, page.status)

    async def process(
        self, params: Mapping[str, str], page: Page, *, bytes_max: int, deadline_s: float
    ) -> Scraped | NotScraped:
        # Without `allowed_status_codes`, only these statuses lead here.
        if 200 <= page.status < 300 and page.status not in allowed_statuses(params):
            recognised = self.judge(page)
            if recognised is not None:
                return recognised
        if not params:
            return _scraped(page)
        unmet = await self._find_unmet(params, page)
        if unmet is not None:
            return _failure(
                FailureReason.BLOCKED, 422, f"{unmet}_not_met", _CONDITION_DETAILS[unmet], True
            )
        # A PDF was made by the browser already.
        if not find_extracting(params) or params.get("response_type") == "pdf":
            return _scraped(page)
        source = Source(
            body=page.body,
            content_type=page.content_type,
            url=page.url,
            params=dict(params),
            bytes_max=bytes_max,
        )
        return await self._extract(source, page.status, deadline_s)

    async def _find_unmet(self, params: Mapping[str, str], page: Page) -> str | None:
        if CONDITIONS.isdisjoint(params):
            return None
        if len(page.body) <= _CHECKED_AT_ONCE_BYTES:
            return find_unmet(params, page.body, page.content_type)
        return await self._executor.run(find_unmet, params, page.body, page.content_type)

    async def _extract(
        self, source: Source, status: int, deadline_s: float
    ) -> Scraped | NotScraped:
        try:
            converted = await self._pool.extract(source, deadline_s=deadline_s)
        except ExtractionTimedOut as error:
            return _failure(FailureReason.TIMEOUT, 504, "timeout", error.detail, True)
        except NotExtracted as error:
            problem_status = _STATUS_OF.get(error.code, 422)
            return _failure(
                FailureReason.BAD_TARGET, problem_status, error.code, error.detail, False
            )
        return Scraped(status=status, content_type=converted.content_type, body=converted.body)


def _scraped(page: Page) -> Scraped:
    return Scraped(status=page.status, content_type=page.content_type, body=page.body)


def failure_from(finding: Finding, status: int) -> NotScraped:
    """Returns the failure that a verdict means. The problem names the rule."""
    meaning = MEANINGS[finding.verdict]
    detail = f"{meaning.detail} (rule {finding.rule})"
    code = f"page_{finding.verdict}"
    return _failure(meaning.reason, status, code, detail, meaning.retryable)


def _failure(
    reason: FailureReason, status: int, code: str, detail: str, retryable: bool
) -> NotScraped:
    problem = make_problem(code, "The answer is not the page", status, detail)
    return NotScraped(reason=reason, problem=problem, retryable=retryable)
