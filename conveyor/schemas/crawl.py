"""Crawls on the wire: requests, responses and views (docs/crawls.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from conveyor.domain import limits
from conveyor.domain.crawl.urls import normalize
from conveyor.domain.crawl_record import Crawl, CrawlEnd, CrawlRules, CrawlStatus, Discovery
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import Format, Task
from conveyor.schemas.requests import (
    PARAMS_SCHEMA,
    BudgetInput,
    HostLimitsInput,
    WebhookInput,
    decode_strictly,
)
from conveyor.schemas.responses import Count, Instant, Ulid
from conveyor.schemas.views import instant

Pattern = Annotated[str, Meta(min_length=1, max_length=limits.URL_CHARS_MAX)]
Patterns = Annotated[list[Pattern], Meta(max_length=limits.CRAWL_PATTERNS_MAX)]
Pages = Annotated[int, Meta(ge=1, le=limits.CRAWL_PAGES_MAX)]
Output = Literal["html", "markdown"]


class CreateCrawlRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A crawl: where it starts, which pages it keeps, and its limits."""

    #: The page that the crawl starts from.
    url: Annotated[str, Meta(max_length=limits.URL_CHARS_MAX)]
    #: Links between the start page and a page at most; no limit if it is omitted.
    depth: Annotated[int, Meta(ge=1, le=limits.CRAWL_DEPTH_MAX)] | None = None
    max_items: Pages = limits.CRAWL_PAGES  #: Pages that are kept at most.
    max_pages: Pages = limits.CRAWL_PAGES  #: Pages that are fetched at most.
    #: Texts of which a kept URL contains one. Pages without are followed and not kept.
    include_patterns: Patterns = []
    #: Texts of which a URL may contain none. Pages with one are neither followed nor kept.
    exclude_patterns: Patterns = []
    #: The format in which the pages are returned; URLs only if it is omitted.
    output_format: Output | None = None
    #: Where pages are found: the links of pages, the sitemaps of the site, or both. `links` if it
    #: is omitted.
    discovery: Annotated[list[Literal["links", "sitemap"]], Meta(min_length=1)] | None = None
    #: Sitemaps to read, instead of those that robots.txt names or `/sitemap.xml`.
    sitemaps: Annotated[list[Pattern], Meta(max_length=limits.CRAWL_SITEMAPS_MAX)] = []
    #: Hosts of the site that are visited at most.
    max_hosts: Annotated[int, Meta(ge=1, le=limits.CRAWL_HOSTS_MAX)] = limits.CRAWL_HOSTS_MAX
    #: Seconds after which the crawl ends.
    max_seconds: Annotated[int, Meta(ge=1, le=limits.CRAWL_SECONDS_MAX)] | None = None
    robots: bool = True  #: Whether robots.txt is obeyed.
    canonical: bool = True  #: Whether a page with another canonical link counts as a duplicate.
    #: Scraper parameters of the pages.
    zenrows_params: Annotated[dict[str, Any], Meta(extra_json_schema=PARAMS_SCHEMA)] | None = None
    webhook: WebhookInput | None = None  #: The receiver of the end of the run.
    budget: BudgetInput | None = None  #: The most that the crawl may spend.
    host_limits: HostLimitsInput | None = None  #: The limits of each host.


_CREATE = msgspec.json.Decoder(CreateCrawlRequest)


def decode_create(body: bytes) -> CreateCrawlRequest:
    return decode_strictly(_CREATE, body)


def rules_from(request: CreateCrawlRequest, page_params: dict[str, str]) -> CrawlRules:
    return CrawlRules(
        depth=request.depth,
        max_items=request.max_items,
        max_pages=request.max_pages,
        max_hosts=request.max_hosts,
        max_seconds=request.max_seconds,
        include=tuple(request.include_patterns),
        exclude=tuple(request.exclude_patterns),
        discovery=tuple(dict.fromkeys(map(Discovery, request.discovery or ["links"]))),
        sitemaps=tuple(_sitemap_from(url) for url in request.sitemaps),
        obeys_robots=request.robots,
        follows_canonical=request.canonical,
        output=Format(request.output_format) if request.output_format else None,
        page_params=page_params or None,
    )


def _sitemap_from(url: str) -> str:
    form = normalize(url)
    if form is None:
        raise InvalidArgument("A sitemap must be an http or https URL.", pointer="/sitemaps")
    return form


class CoverageResponse(msgspec.Struct, frozen=True):
    """How far a crawl has got."""

    pages_fetched: Count  #: Pages and sitemaps that were fetched and read for links.
    pages_failed: Count  #: Those of them that could not be fetched.
    items_found: Count  #: Pages that are kept.


class CrawlErrorResponse(msgspec.Struct, frozen=True):
    """Why a crawl failed, or was stopped by an account-level error."""

    code: str  #: The word that programs branch on.
    detail: str  #: The same, in words.


class CrawlResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A crawl, and the limits that it runs with."""

    crawl_id: Ulid  #: The id of the crawl, and of the job that fetches its pages.
    status: CrawlStatus  #: The state of the crawl.
    url: str  #: The page that it started from.
    max_items: int  #: Pages that are kept at most.
    max_pages: int  #: Pages that are fetched at most.
    discovery: list[Discovery]  #: Where pages are found.
    coverage: CoverageResponse  #: How far it has got.
    created_at: Instant  #: When it was created.
    depth: int | None = None  #: Links between the start page and a page at most.
    stop_reason: CrawlEnd | None = None  #: What ended it before its last link.
    error: CrawlErrorResponse | None = None  #: Why it failed.
    include_patterns: list[str] = []  #: Texts of which a kept URL contains one.
    exclude_patterns: list[str] = []  #: Texts of which a URL may contain none.
    output_format: Output | None = None  #: The format of the pages.
    duplicates_removed: int = 0  #: Links to pages that were known.
    finished_at: Instant | None = None  #: When it ended.


class CrawlResultResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page that a crawl kept."""

    url: str  #: The URL of the page.
    #: Whether the page can be read: `fetched`, `failed` or `expired`. Only with an output format.
    content_status: str | None = None
    content_url: str | None = None  #: The path of the page, once it is fetched.


class CrawlPageResponse(CrawlResponse, frozen=True, kw_only=True, omit_defaults=True):
    """A crawl, and some of the pages that it kept, in the order in which it kept them."""

    results: list[CrawlResultResponse]  #: The pages.
    #: The cursor of those that follow. Absent after the last page of a crawl that has ended.
    next_cursor: str | None = None


class ListCrawlsResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of crawls, newest first."""

    crawls: list[CrawlResponse]  #: The crawls.
    next_cursor: str | None = None  #: The cursor of the next page; absent on the last one.


class StopCrawlResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a crawl stands after a stop."""

    crawl_id: Ulid  #: The id of the crawl.
    status: CrawlStatus  #: The state of the crawl.
    stop_reason: CrawlEnd | None = None  #: What ended it.
    error: CrawlErrorResponse | None = None  #: Why it failed.
    finished_at: Instant | None = None  #: When it ended.


class CrawlDownloadLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the download of a crawl."""

    url: str  #: The URL of the page.
    content_status: str | None = None  #: Whether the page can be read.
    content: str | None = None  #: The page, if it is fetched.


def crawl_view(crawl: Crawl) -> CrawlResponse:
    return CrawlResponse(**_fields_of(crawl))


def crawl_page_view(
    crawl: Crawl, results: list[CrawlResultResponse], next_cursor: str | None
) -> CrawlPageResponse:
    return CrawlPageResponse(**_fields_of(crawl), results=results, next_cursor=next_cursor)


def _fields_of(crawl: Crawl) -> dict[str, Any]:
    rules = crawl.rules
    return {
        "crawl_id": crawl.job_id,
        "status": crawl.status,
        "url": crawl.url,
        "depth": rules.depth,
        "max_items": rules.max_items,
        "max_pages": rules.max_pages,
        "discovery": list(rules.discovery),
        "coverage": CoverageResponse(crawl.fetched, crawl.failed, crawl.items),
        "created_at": instant(crawl.created_at),
        "stop_reason": crawl.ended_by,
        "error": _error_of(crawl),
        "include_patterns": list(rules.include),
        "exclude_patterns": list(rules.exclude),
        "output_format": rules.output,
        "duplicates_removed": crawl.duplicates,
        "finished_at": None if crawl.finished_at is None else instant(crawl.finished_at),
    }


def stop_view(crawl: Crawl) -> StopCrawlResponse:
    return StopCrawlResponse(
        crawl_id=crawl.job_id,
        status=crawl.status,
        stop_reason=crawl.ended_by,
        error=_error_of(crawl),
        finished_at=None if crawl.finished_at is None else instant(crawl.finished_at),
    )


def _error_of(crawl: Crawl) -> CrawlErrorResponse | None:
    # What was noted while it ran is an error only if the crawl ended by it.
    if crawl.error_code is None or crawl.finished_at is None or crawl.ended_by is not None:
        return None
    if crawl.status is CrawlStatus.COMPLETED:
        return None
    return CrawlErrorResponse(crawl.error_code, crawl.error_detail or crawl.error_code)


def crawl_result_view(crawl: Crawl, task: Task, *, is_expired: bool) -> CrawlResultResponse:
    if crawl.rules.output is None:
        return CrawlResultResponse(url=task.url)
    if task.result is None or is_expired:
        status = "expired" if is_expired else "failed"
        return CrawlResultResponse(url=task.url, content_status=status)
    path = f"/v1/crawls/{crawl.job_id}/contents/{task.task_id}"
    return CrawlResultResponse(url=task.url, content_status="fetched", content_url=path)
