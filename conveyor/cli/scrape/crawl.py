"""`conveyor scrape --crawl` and `--sitemap`: rounds over one folder (docs/scrape.md, Crawls).

Each round fetches all pages that are known, and the stored pages lead to those of the next round.
The frontier is not stored: it follows from the folder, so a crawl that was killed continues like
any list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import click
import msgspec

from conveyor.cli.scrape.display import Display, counted
from conveyor.cli.scrape.folder import LIST_NAME
from conveyor.cli.scrape.inputs import PageList, hosts_of
from conveyor.cli.scrape.pages import Page, PageStatus, ResultLine
from conveyor.cli.scrape.run import EXIT_SOME_FAILED, Ended, Order, run_order
from conveyor.domain.crawl.links import Reading, read_page, read_sitemap
from conveyor.domain.crawl.urls import LinkFilter, host_in, normalize, site_of
from conveyor.domain.submit.charset import looks_like_html

# Reading so many pages for links takes long enough to say so.
SHOWN_UNREAD = 200
_LINE = msgspec.json.Decoder(ResultLine)


@dataclass(frozen=True, slots=True)
class CrawlOptions:
    """Where a crawl starts, and how far it goes. A page contains one of `match`, if there are
    any."""

    start: str | None
    sitemap: str | None
    depth: int | None
    match: tuple[str, ...]
    max_pages: int


@dataclass(slots=True)
class Frontier:
    """The pages that the folder leads to, by their distance from the start."""

    order: Order
    options: CrawlOptions
    depths: dict[str, int] = field(default_factory=dict)
    sitemaps: set[str] = field(default_factory=set)
    readings: dict[str, Reading] = field(default_factory=dict)
    is_cut: bool = False  #: There are more pages than a crawl may have.
    starts: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list)  #: Why a start leads to no page.

    def begin(self) -> None:
        for text in (self.options.start, self.options.sitemap):
            url = None if text is None else normalize(text)
            if text is not None and url is None:
                raise click.UsageError(f"{text} is no http or https URL.")
            if url is not None:
                self.depths[url] = 0
        self.starts = frozenset(self.depths)
        if self.options.sitemap is not None:
            self.sitemaps.add(normalize(self.options.sitemap) or "")

    def page_list(self) -> PageList:
        pages = [Page(url) for url in self.depths]
        return PageList(pages, hosts_of(pages))

    def grow(self) -> int:
        """Adds the pages that those of the folder lead to. Returns how many are new."""
        for line in self._lines():
            if line.url in self.depths and line.url not in self.readings:
                self.readings[line.url] = self._read(line)
        count = len(self.depths)
        for url in list(self.depths):
            self._follow(url)
        return len(self.depths) - count

    def _follow(self, url: str) -> None:
        reading, depth = self.readings.get(url, Reading()), self.depths[url]
        links = (reading.moved_to,) if reading.moved_to else reading.links
        is_deepest = self.options.depth is not None and depth >= self.options.depth
        if is_deepest and url not in self.sitemaps and not reading.moved_to:
            links = ()
        for link in (*links, *reading.sitemaps):
            if len(self.depths) < self.options.max_pages:
                self.depths.setdefault(link, depth + (url not in self.sitemaps))
            elif link not in self.depths:
                self.is_cut = True
        self.sitemaps.update(link for link in reading.sitemaps if link in self.depths)

    def _read(self, line: ResultLine) -> Reading:
        if line.status != PageStatus.SUCCESSFUL or line.file is None:
            return self._no_start(line, f"could not be fetched: {line.detail}")
        body = (self.order.folder / line.file).read_bytes()
        if line.url in self.sitemaps:
            reading = read_sitemap(line.url, body, self._filter())
            if reading.links or reading.sitemaps:
                return reading
            is_page = looks_like_html(body)
            return self._no_start(line, "is no sitemap" if is_page else "lists no page of its site")
        is_linked = self.options.start is not None
        if not is_linked:
            return Reading()
        reading = read_page(
            line.url,
            body,
            line.content_type or "",
            line.final_url,
            self._filter(),
            is_markdown=False,
            follows_canonical=True,
        )
        if reading.moved_to == "":
            return self._no_start(line, f"leads to another site: {line.final_url}")
        return msgspec.structs.replace(
            reading, links=tuple(link for link in reading.links if self._matches(link))
        )

    def _no_start(self, line: ResultLine, why: str) -> Reading:
        if line.url in self.starts:
            self.problems.append(f"{line.url} {why}")
        return Reading()

    def _filter(self) -> LinkFilter:
        return LinkFilter(site_of(host_in(next(iter(self.depths)))))

    def _matches(self, url: str) -> bool:
        return not self.options.match or any(pattern in url for pattern in self.options.match)

    def _lines(self) -> Iterator[ResultLine]:
        with (self.order.folder / LIST_NAME).open("rb") as file:
            yield from map(_LINE.decode, file)


def run_crawl(order: Order, options: CrawlOptions, display: Display, started_at: float) -> Ended:
    """Runs rounds until the pages of the folder lead to no new one."""
    frontier = Frontier(order, options)
    frontier.begin()
    # The first list is that of the start, so a folder of another list is refused.
    order = replace(order, is_round=True)
    while True:
        ended = run_order(replace(order, page_list=frontier.page_list()), display, started_at)
        if ended.code:
            return ended
        order = replace(order, restarts=False, retries_failed=False, updates=True)
        if (unread := len(frontier.depths) - len(frontier.readings)) >= SHOWN_UNREAD:
            display.phase(f"Following the links of {counted(unread, 'page')}")
        if not frontier.grow():
            order = replace(order, is_round=False, updates=False)
            ended = run_order(order, display, started_at)
            if frontier.is_cut:
                display.say(f"There are more pages: --max-pages is {options.max_pages:,}.")
            for problem in frontier.problems:
                display.say(f"{problem}.")
            return replace(ended, code=EXIT_SOME_FAILED) if frontier.problems else ended
