"""How `conveyor scrape` learns the rules of a site: what it asks for, and when it asks again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from conveyor.cli.scrape.folder import Folder
from conveyor.cli.scrape.options import ScrapeOptions
from conveyor.cli.scrape.pages import Page
from conveyor.cli.scrape.scraper import Scraper
from conveyor.domain.crawl.robots import ROBOTS_BYTES_MAX
from conveyor.domain.model import FailureReason, Problem
from conveyor.ports.gateway import NotScraped, Outcome, Scraped, ScrapeRequest

RULES = b"User-agent: *\nDisallow: /private\n"


class RobotsGateway:
    """Answers with one outcome after the other, as far as the request allows its size."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = list(outcomes)
        self.asked_at: list[float] = []

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.asked_at.append(trio.current_time())
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Scraped) and len(outcome.body) > request.body_bytes_max:
            return problem(413, code="body_too_large")
        return outcome


def problem(
    status: int, *, code: str = "target_server_error", retry_after_s: float | None = None
) -> NotScraped:
    return NotScraped(
        reason=FailureReason.OTHER,
        problem=Problem(type="about:blank", code=code, title="", status=status, detail="busy"),
        retryable=True,
        retry_after_s=retry_after_s,
    )


def file(body: bytes) -> Scraped:
    return Scraped(status=200, content_type="text/plain", body=body)


async def taken(tmp_path: Path, gateway: RobotsGateway) -> list[int]:
    """Returns the pages that may be fetched, of one that the rules forbid and one that they do
    not."""
    pages = [Page("http://shop.example/private"), Page("http://shop.example/open")]
    folder = Folder(tmp_path / "out")
    folder.open()
    folder.pages = pages
    list(folder.open_results(checks_digests=False))
    scraper = Scraper(folder, pages, ["shop.example"] * 2, ScrapeOptions())
    scraper.add([0, 1])
    found: list[int] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(scraper.run, gateway)
        index = await scraper.next_page()
        if index is not None:
            found.append(index)
        nursery.cancel_scope.cancel()
    folder.close()
    return found


async def test_a_long_file_is_read(tmp_path: Path, autojump_clock: MockClock) -> None:
    """RFC 9309, 2.5: a crawler reads the first 500 KiB at least."""
    gateway = RobotsGateway([file(RULES + b"# filler\n" * (ROBOTS_BYTES_MAX // 4))])

    assert await taken(tmp_path, gateway) == [1]


@pytest.mark.parametrize(("asked_s", "waited_s"), [(None, 1.0), (7.0, 7.0), (86_400.0, 60.0)])
async def test_a_site_that_names_a_time_is_asked_then(
    tmp_path: Path, autojump_clock: MockClock, asked_s: float | None, waited_s: float
) -> None:
    gateway = RobotsGateway([problem(503, retry_after_s=asked_s), file(RULES)])

    assert await taken(tmp_path, gateway) == [1]
    assert gateway.asked_at[1] - gateway.asked_at[0] == waited_s
