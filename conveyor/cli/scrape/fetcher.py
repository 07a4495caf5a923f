"""Fetches one page and hands what came of it to the writer or the one who decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from conveyor import __version__
from conveyor.cli.scrape.options import ScrapeOptions
from conveyor.cli.scrape.page_writer import PageWriter, Settle
from conveyor.cli.scrape.pages import Answer, Page
from conveyor.domain import limits
from conveyor.domain.crawl.robots import AGENT
from conveyor.ports.gateway import (
    Contact,
    Gateway,
    GatewayReport,
    NotScraped,
    Outcome,
    Scraped,
    ScrapeRequest,
)

# The name that robots.txt may address, and the one that sites see.
USER_AGENT = f"{AGENT}/{__version__} (batch scraper; obeys robots.txt for {AGENT!r})"
_CALLER = "local"


class Fetcher:
    """`settle` gets the answers that bring no page; those with a page come from the writer."""

    def __init__(
        self,
        gateway: Gateway,
        pages: Sequence[Page],
        options: ScrapeOptions,
        writer: PageWriter,
        settle: Settle,
        *,
        api_key: str | None,
        is_direct: bool,
    ) -> None:
        self._gateway = gateway
        self._pages = pages
        self._options = options
        self._writer = writer
        self._settle = settle
        self._api_key = api_key
        self._headers = dict(options.headers)
        if is_direct and "user-agent" not in map(str.lower, options.headers):
            self._headers["User-Agent"] = USER_AGENT
        self._params = job_params(options)
        self._body_bytes_max = options.max_bytes or limits.BODY_BYTES_MAX

    async def fetch(self, index: int) -> None:
        """Returns when the answer is settled."""
        began_at = trio.current_time()
        outcome = await self._gateway.scrape(self._request(index))
        answer = answer_from(index, trio.current_time() - began_at, outcome)
        if isinstance(outcome, Scraped):
            await self._writer.put(answer, outcome.body)
        else:
            self._settle([answer])

    def _request(self, index: int) -> ScrapeRequest:
        page, options = self._pages[index], self._options
        return ScrapeRequest(
            url=page.url,
            method=page.method,
            params={**self._params, **page.params} if page.params else self._params,
            headers={**self._headers, **page.headers} if page.headers else self._headers,
            body=page.body,
            body_content_type=page.content_type,
            auth=self._api_key,
            identity=str(index),
            partition=_CALLER,
            deadline_s=options.timeout_s,
            body_bytes_max=self._body_bytes_max,
        )


def job_params(options: ScrapeOptions) -> Mapping[str, str]:
    """Returns the scraper parameters of every page."""
    if not options.accept_status:
        return options.params
    return {**options.params, "allowed_status_codes": ",".join(map(str, options.accept_status))}


def robots_request(url: str, options: ScrapeOptions) -> ScrapeRequest:
    names = {name.lower(): value for name, value in options.headers.items()}
    return ScrapeRequest(
        url=url,
        method="GET",
        params={},
        headers={"User-Agent": names.get("user-agent", USER_AGENT)},
        body=None,
        body_content_type=None,
        auth=None,
        identity=url,
        partition=_CALLER,
        deadline_s=min(options.timeout_s, 30.0),
        body_bytes_max=limits.BODY_BYTES_MAX,
    )


def answer_from(index: int, seconds: float, outcome: Outcome) -> Answer:
    if isinstance(outcome, Scraped):
        answer = Answer(
            index,
            round(seconds, 3),
            http_status=outcome.status,
            content_type=outcome.content_type,
            final_url=outcome.final_url,
        )
    elif isinstance(outcome, NotScraped):
        answer = _failed(index, seconds, outcome)
    else:
        answer = Answer(
            index,
            round(seconds, 3),
            error=outcome.reason,
            detail=outcome.detail,
            is_deferred=True,
            retry_after_s=outcome.retry_after_s,
        )
    answer.credits, answer.cost_micros = outcome.credits, outcome.cost_micros
    answer.is_cost_known = outcome.cost_known
    return answer


def _failed(index: int, seconds: float, outcome: NotScraped) -> Answer:
    problem, report = outcome.problem, outcome.report
    # Only an answer of the site has a status of its own; other problems have one for the API.
    is_sites = problem.code.startswith(("target_", "page_", "unexpected_status"))
    return Answer(
        index,
        round(seconds, 3),
        http_status=problem.status if is_sites else None,
        error=problem.code,
        detail=problem.detail,
        reason=outcome.reason,
        is_retryable=outcome.retryable,
        is_throttled=is_sites and problem.status in {429, 503},
        retry_after_s=outcome.retry_after_s,
        run_failure=outcome.run_failure,
        is_deferred=_is_refused(report),
        gateway_limit=None if report is None else report.limit,
    )


def _is_refused(report: GatewayReport | None) -> bool:
    """Whether the gateway takes no more calls for now, which is not the fault of the page."""
    return report is not None and report.contact is Contact.REFUSED
