"""Tests the unmodified crawl client of `zenrows` against real servers, which are killed during a
crawl."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows import CrawlAPIError
from zenrows.crawl import ZenRowsCrawlClient
from zenrows.crawl.models import ContentStatus, CrawlStatus, StopReason

from tests.e2e.cloud import aws_deployment
from tests.e2e.crawls import KEY, crawl_with_kills, embedded, in_cloud
from tests.e2e.programs import Server, a_server
from tests.e2e.trap_site import EXCLUDED, TrapSite, a_trap_site
from tests.tidy.sources import ROOT

pytestmark = pytest.mark.slow

PAGES, AWS_PAGES = 300, 60


class RecordingClient(ZenRowsCrawlClient):
    """A client that records which of its public methods were called."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            super().__getattribute__("__dict__").setdefault("called", set()).add(name)
        return super().__getattribute__(name)


def a_client(server: Server) -> RecordingClient:
    options = {"transport": httpx.HTTPTransport(), "trust_env": False}
    return RecordingClient(KEY, base_url=f"{server.url}/v1", retries=0, httpx_args=options)


def public_methods() -> set[str]:
    return {
        name
        for name, member in vars(ZenRowsCrawlClient).items()
        if not name.startswith("_") and callable(member)
    }


@pytest.fixture
def site() -> Iterator[TrapSite]:
    with a_trap_site(40) as site:
        yield site


def test_every_public_method_of_the_crawl_client_works(site: TrapSite, tmp_path: Path) -> None:
    with a_server(tmp_path / "data") as server, a_client(server) as client:
        created = client.create(
            f"{site.url}/",
            max_items=1000,
            max_pages=1000,
            include_patterns=["/p/"],
            exclude_patterns=[EXCLUDED],
            output_format="html",
            discovery=["links"],
            idempotency_key="once",
        )
        again = client.create(
            f"{site.url}/",
            max_items=1000,
            max_pages=1000,
            include_patterns=["/p/"],
            exclude_patterns=[EXCLUDED],
            output_format="html",
            discovery=["links"],
            idempotency_key="once",
        )
        ended = client.wait(created.crawl_id, timeout=240)
        results = list(client.results(created.crawl_id, limit=7))
        page = client.get(created.crawl_id, limit=10_000)
        texts = [
            client.content(created.crawl_id, results[0]),
            client.content(created.crawl_id, str(results[0].content_url), download=True),
        ]
        with client.download(created.crawl_id) as download:
            lines = list(download.lines)
        stopped = client.stop(created.crawl_id)
        listed = client.list(limit=1)
        client.close()
        called = client.called  # type: ignore[attr-defined]

    assert created.status is CrawlStatus.RUNNING
    assert again.crawl_id == created.crawl_id
    assert (ended.status, ended.stop_reason, ended.error) == (CrawlStatus.COMPLETED, None, None)
    assert {row.url for row in results} == {f"{site.url}/p/{number}" for number in range(40)}
    assert len(results) == ended.coverage.items_found == 40
    assert page.results == results
    assert page.next_cursor is None
    assert all(row.content_status is ContentStatus.FETCHED for row in results)
    assert texts[0] == texts[1]
    assert texts[0].startswith("<!doctype html>")
    assert download.status is CrawlStatus.COMPLETED
    assert [line.url for line in lines] == [row.url for row in results]
    assert lines[0].content == texts[0]
    assert stopped.status is CrawlStatus.COMPLETED
    assert [crawl.crawl_id for crawl in listed.crawls] == [created.crawl_id]
    assert listed.next_cursor is None
    assert called >= public_methods()


def test_the_document_lists_exactly_the_methods_of_the_client() -> None:
    text = (ROOT / "docs/crawls.md").read_text(encoding="utf-8")

    assert set(re.findall(r"^\| `(\w+)` \| [`n]", text, re.MULTILINE)) >= public_methods()


def test_the_client_reads_limits_stops_and_refusals(site: TrapSite, tmp_path: Path) -> None:
    with a_server(tmp_path / "data") as server, a_client(server) as client:
        few = client.create(f"{site.url}/", max_items=5, exclude_patterns=[EXCLUDED])
        near = client.create(f"{site.url}/", depth=1, max_pages=1000)
        small = client.create(f"{site.url}/", max_pages=3, exclude_patterns=[EXCLUDED])
        lost = client.create(f"{site.url}/missing/1")
        mapped = client.create(f"{site.url}/", max_items=50, discovery=["sitemap"])  # type: ignore[list-item]
        endless = client.create(f"{site.url}/calendar/1", max_pages=1_000_000, max_items=1_000_000)
        ends = [
            client.wait(crawl.crawl_id, timeout=240) for crawl in (few, near, small, lost, mapped)
        ]
        stopped = client.stop(endless.crawl_id)
        urls = {row.url for row in client.results(near.crawl_id)}
        with pytest.raises(CrawlAPIError) as unknown:
            client.get("01JD0000000000000000000000")
        with pytest.raises(CrawlAPIError) as no_content:
            client.content(few.crawl_id, "0" * 32)
        with pytest.raises(CrawlAPIError) as bad_start:
            client.create("ftp://example.com/")

    reasons = [(end.status, end.stop_reason) for end in ends]
    assert reasons == [
        (CrawlStatus.COMPLETED, StopReason.MAX_ITEMS),
        (CrawlStatus.COMPLETED, None),
        (CrawlStatus.COMPLETED, StopReason.MAX_PAGES),
        (CrawlStatus.FAILED, None),
        (CrawlStatus.COMPLETED, None),
    ]
    assert ends[0].coverage.items_found == 5
    assert urls == {f"{site.url}/", f"{site.url}/p/0", *site.failing_urls()}
    assert ends[2].coverage.pages_fetched == 3
    assert ends[3].error is not None
    assert ends[3].error.code.value == "seed_unreachable"
    assert ends[4].coverage.items_found == 41
    assert (stopped.status, stopped.stop_reason) == (CrawlStatus.STOPPED, StopReason.USER)
    assert (unknown.value.status_code, unknown.value.code) == (404, "crawl_not_found")
    assert (no_content.value.status_code, no_content.value.code) == (404, "content_not_found")
    assert (bad_start.value.status_code, bad_start.value.code) == (400, "invalid_start_url")


def test_a_crawl_with_two_kills_keeps_exactly_the_pages_of_the_site(tmp_path: Path) -> None:
    with a_trap_site(PAGES) as site, embedded(tmp_path) as deployment:
        outcome = crawl_with_kills(site, deployment, kills=2)

        assert outcome.differences(site) == []


def test_a_crawl_on_aws_with_two_kills_keeps_exactly_the_pages_of_the_site(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with a_trap_site(AWS_PAGES) as site, aws_deployment(request, tmp_path) as cloud:
        outcome = crawl_with_kills(site, in_cloud(cloud), kills=2)

        assert outcome.differences(site) == []
