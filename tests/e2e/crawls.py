"""Crawls a site with traps, with kills on the way: `python -m tests.e2e.crawls --pages 20000`.

The pages that the crawl kept are compared with the pages of the site. `--engine aws` uses local
servers that stand in for AWS.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
from zenrows.crawl import ZenRowsCrawlClient
from zenrows.crawl.models import Crawl, CrawlStatus

from tests.e2e.cloud import Cloud, aws_deployment_on
from tests.e2e.programs import Server, until
from tests.e2e.trap_site import EXCLUDED, TrapSite, a_trap_site
from tests.servers import a_localstack, a_ministack, a_seaweed

KEY = "tests"


@dataclass(slots=True)
class Deployment:
    """A deployment that can be killed and restarted, and the process that crawls."""

    url: Callable[[], str]
    restart: Callable[[], None]
    pid: Callable[[], int]


@dataclass(slots=True)
class Outcome:
    crawl: Crawl
    fetched: set[str]
    failed: set[str]
    lines: int
    kills: int
    seconds: float
    rss_mb: list[int] = field(default_factory=list)

    def differences(self, site: TrapSite) -> list[str]:
        """Returns every difference between the crawl and the site."""
        wrong = [f"missing {url}" for url in sorted(site.kept_urls() - self.fetched)]
        wrong += [f"not of the site: {url}" for url in sorted(self.fetched - site.kept_urls())]
        wrong += [f"failed: {url}" for url in sorted(self.failed ^ site.failing_urls())]
        if self.lines != len(self.fetched) + len(self.failed):
            wrong.append(f"{self.lines} results for {len(self.fetched | self.failed)} pages")
        if self.crawl.status is not CrawlStatus.COMPLETED:
            wrong.append(f"the crawl is {self.crawl.status}")
        wrong += [f"fetched: {path}" for path in site.requests if "forbidden" in path]
        return wrong


def crawl_with_kills(site: TrapSite, deployment: Deployment, *, kills: int) -> Outcome:
    """Crawls the whole site, and kills the server at equal distances of progress."""
    begun_at, rss_mb = time.monotonic(), []
    with _client(deployment) as client:
        crawl_id = client.create(
            f"{site.url}/",
            max_items=10 * site.pages + 100,
            max_pages=10 * site.pages + 100,
            exclude_patterns=[EXCLUDED],
            output_format="html",
        ).crawl_id
    for number in range(kills):
        goal = site.pages * (number + 1) // (kills + 1)
        _wait_for_items(deployment, crawl_id, goal)
        rss_mb.append(_rss_mb(deployment.pid()))
        deployment.restart()
    until(
        "the end of the crawl",
        lambda: _crawl(deployment, crawl_id).status is not CrawlStatus.RUNNING or None,
        deadline_s=7200,
        every_s=0.5,
    )
    rss_mb.append(_rss_mb(deployment.pid()))
    with _client(deployment) as client:
        crawl = client.wait(crawl_id)
        results = list(client.results(crawl_id))
    return Outcome(
        crawl=crawl,
        fetched={row.url for row in results if row.content_url},
        failed={row.url for row in results if not row.content_url},
        lines=len(results),
        kills=kills,
        seconds=time.monotonic() - begun_at,
        rss_mb=rss_mb,
    )


def _wait_for_items(deployment: Deployment, crawl_id: str, count: int) -> None:
    def has_come() -> bool:
        return _crawl(deployment, crawl_id).coverage.items_found >= count

    until("progress", has_come, deadline_s=7200, every_s=0.1)


def _crawl(deployment: Deployment, crawl_id: str) -> Crawl:
    with _client(deployment) as client:
        return client.get(crawl_id, limit=1)


@contextmanager
def _client(deployment: Deployment) -> Iterator[ZenRowsCrawlClient]:
    options: dict[str, Any] = {"transport": httpx.HTTPTransport(), "trust_env": False}
    url = f"{deployment.url()}/v1"
    with ZenRowsCrawlClient(KEY, base_url=url, httpx_args=options) as client:
        yield client


def _rss_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@contextmanager
def embedded(folder: Path) -> Iterator[Deployment]:
    server = Server(folder / "data")
    server.start()

    def restart() -> None:
        server.kill()
        server.start()

    def pid() -> int:
        assert server.process is not None
        return server.process.pid

    try:
        yield Deployment(lambda: server.url, restart, pid)
    finally:
        server.kill()


@contextmanager
def on_aws(folder: Path) -> Iterator[Deployment]:
    """Runs an API and a worker on servers that stand in for AWS."""
    with (
        a_ministack(_folder(folder, "dynamodb")) as dynamodb,
        a_localstack(_folder(folder, "sqs")) as sqs,
        a_seaweed(_folder(folder, "s3") / "home") as s3,
        aws_deployment_on(folder, dynamodb=dynamodb, sqs=sqs, s3=s3) as cloud,
    ):
        yield in_cloud(cloud)


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def in_cloud(cloud: Cloud) -> Deployment:
    """Runs an API and a worker; a restart kills both."""
    urls: list[str] = []

    def restart() -> None:
        cloud.end()
        urls[:] = [cloud.api()]
        cloud.workers(1)

    restart()
    return Deployment(lambda: urls[0], restart, lambda: cloud.processes[-1].pid)


ENGINES = {"embedded": embedded, "aws": on_aws}


@click.command()
@click.option("--pages", type=click.IntRange(1), default=20_000, help="Pages of the site.")
@click.option("--kills", type=click.IntRange(0), default=2, help="How often the server is killed.")
@click.option("--engine", type=click.Choice(list(ENGINES)), default="embedded")
def main(pages: int, kills: int, engine: str) -> None:
    """Crawl a site with traps, with kills on the way, and compare the kept pages."""
    with (
        tempfile.TemporaryDirectory() as folder,
        a_trap_site(pages) as site,
        ENGINES[engine](Path(folder)) as deployment,
    ):
        outcome = crawl_with_kills(site, deployment, kills=kills)
        wrong = outcome.differences(site)
    coverage = outcome.crawl.coverage
    click.echo(
        f"{engine}: {pages:,} pages, {coverage.pages_fetched:,} fetches, {outcome.kills} kills, "
        f"{outcome.seconds:.0f} s, {coverage.pages_fetched / outcome.seconds:.0f} fetches a second"
    )
    click.echo(f"links to known pages: {outcome.crawl.duplicates_removed:,}")
    click.echo(f"memory at each kill and at the end: {outcome.rss_mb} MB")
    click.echo(f"differences: {len(wrong)}")
    for line in wrong[:20]:
        click.echo(f"  {line}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
