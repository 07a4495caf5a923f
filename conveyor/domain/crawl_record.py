"""Crawl: the stored state of a crawl, and the log of its steps (docs/crawls.md, State).

A crawl feeds an open job. A page is a task whose id is a hash of its URL, so the tasks are also the
set of pages that were seen. The log says which pages were found, in which order, and which of them
are still to be read for links.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from conveyor.domain import limits
from conveyor.domain.ids import CallerId, JobId, RunId, TaskId, fire_id, minted_at
from conveyor.domain.model import Format


class CrawlStatus(StrEnum):
    """The state of a crawl."""

    RUNNING = "running"  #: Pages are fetched, and their links are followed.
    COMPLETED = "completed"  #: No link is left, or a limit was reached.
    STOPPED = "stopped"  #: The caller stopped it, or an account-level error did.
    FAILED = "failed"  #: The start page could not be read.


class CrawlEnd(StrEnum):
    """What ended a crawl before its last link."""

    MAX_ITEMS = "max_items"  #: So many pages were kept.
    MAX_PAGES = "max_pages"  #: So many pages were fetched, and there were more.
    MAX_SECONDS = "max_seconds"  #: The time was over.
    USER = "user"  #: The caller stopped it.


class Discovery(StrEnum):
    """Where a crawl finds pages."""

    LINKS = "links"  #: The links of the pages.
    SITEMAP = "sitemap"  #: The sitemaps of the site.


class EntryKind(StrEnum):
    START = "start"  #: What the caller asked for; it is read without a fetch.
    PAGE = "page"
    SITEMAP = "sitemap"


class CrawlRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the caller of a crawl chose."""

    depth: int | None = None  #: Links between the start page and a page at most.
    max_items: int = limits.CRAWL_PAGES  #: Pages that are kept at most.
    max_pages: int = limits.CRAWL_PAGES  #: Pages that are fetched at most.
    max_hosts: int = limits.CRAWL_HOSTS_MAX  #: Hosts of the site that are visited at most.
    max_seconds: int | None = None  #: Seconds after which the crawl ends.
    include: tuple[str, ...] = ()  #: A kept URL contains one of these.
    exclude: tuple[str, ...] = ()  #: A URL that contains one of these is not followed.
    discovery: tuple[Discovery, ...] = (Discovery.LINKS,)  #: Where pages are found.
    sitemaps: tuple[str, ...] = ()  #: Sitemaps that the caller named.
    obeys_robots: bool = True  #: Whether robots.txt decides.
    follows_canonical: bool = True  #: Whether canonical links name duplicates.
    output: Format | None = None  #: The format of the pages; absent for URLs only.
    page_params: dict[str, str] | None = None  #: Scraper parameters of the pages.


class CrawlEntry(msgspec.Struct, frozen=True, array_like=True):
    """A page or a sitemap whose links are still to be followed."""

    task_id: TaskId  #: The task that fetches it.
    depth: int  #: Links between the start page and this one.
    kind: EntryKind  #: start, page or sitemap.


class Crawl(msgspec.Struct, frozen=True):
    """A crawl: the intent to follow links, and how far that has got."""

    job_id: JobId  #: The job that fetches the pages; also the id of the crawl.
    run_id: RunId  #: The first run of that job.
    caller: CallerId  #: The caller that owns the crawl.
    status: CrawlStatus  #: running, completed, stopped or failed.
    url: str  #: The start page, as the caller wrote it.
    rules: CrawlRules  #: What the caller chose.
    created_at: float  #: When the crawl was created.
    updated_at: float  #: When the row last changed.
    #: When a crawler has to act on it; when claimed, when the claim lapses. Absent after its end.
    due_at: float | None = None
    version: int = 0  #: Raised by every step; guards the next one.
    steps: int = 1  #: Steps in the log.
    read_to: int = 0  #: Steps before this one have no entry left.
    waiting: int = 1  #: Entries whose links are still to be followed.
    pages: int = 0  #: Pages and sitemaps that were found.
    fetched: int = 0  #: Pages and sitemaps that were fetched and read.
    failed: int = 0  #: Those of them that could not be fetched.
    items: int = 0  #: Pages that are kept.
    duplicates: int = 0  #: Links to pages that were known.
    hosts: tuple[str, ...] = ()  #: Hosts that were visited.
    cut_task: TaskId | None = None  #: A page some of whose links were not followed yet.
    cut_at: int = 0  #: Links of that page that were followed.
    is_cut_off: bool = False  #: Whether a link was dropped because of `max_pages`.
    ended_by: CrawlEnd | None = None  #: What ended it before its last link.
    error_code: str | None = None  #: Why it failed.
    error_detail: str | None = None  #: The same, in words.
    finished_at: float | None = None  #: When it ended.


class CrawlStep(msgspec.Struct, frozen=True):
    """One step of a crawl: the pages that it found, and those that it kept, in order."""

    job_id: JobId  #: The crawl.
    run_id: RunId  #: Its run.
    number: int  #: 0 for the first step.
    waiting: tuple[CrawlEntry, ...] = ()  #: Found entries whose links are still to be followed.
    items: tuple[TaskId, ...] = ()  #: Pages that this step kept.


def run_of(job_id: JobId) -> RunId:
    """Returns the run of a crawl. It follows from the job, so that no row has to be read for it."""
    return fire_id(job_id, minted_at(job_id))


def page_id(run_id: RunId, url: str) -> TaskId:
    """Returns the id of the page with this normal form. So no page is a task twice."""
    return _hash(f"{run_id}:page:{url}")


def sitemap_id(run_id: RunId, url: str) -> TaskId:
    return _hash(f"{run_id}:sitemap:{url}")


def robots_id(run_id: RunId, origin: str) -> TaskId:
    return _hash(f"{run_id}:robots:{origin}")


def _hash(text: str) -> TaskId:
    return TaskId(hashlib.sha256(text.encode()).hexdigest()[:32])
