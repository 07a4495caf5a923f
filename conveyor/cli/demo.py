"""`conveyor demo`: runs a real job of a thousand pages against a bundled site
(docs/operations.md, Roles)."""

from __future__ import annotations

import gzip
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import click
import trio
from rich.console import Console

from conveyor.cli.local_run import RunSummary, running_worker, start_job, watch_run
from conveyor.cli.progress import progress
from conveyor.cli.result_files import make_folder, write_results
from conveyor.cli.scrape import ScrapeJob, report
from conveyor.cli.shutdown import run_command
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.telemetry import set_up_logging

CONCURRENCY = 50


@click.command()
@click.option("--pages", type=click.IntRange(1, 100_000), default=1_000, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-results"),
    show_default=True,
    help="Folder for the pages.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.pass_obj
def demo(settings: Settings, pages: int, output: Path, as_json: bool) -> None:
    """Scrape a bundled local site. Some of its pages are slow, flaky or missing."""
    console = Console(stderr=True)
    set_up_logging("text", level=logging.WARNING)
    numbers = range(pages)
    missing = sum(map(is_missing, numbers))
    console.print(
        f"A site on this machine has {pages:,} pages: {sum(map(is_slow, numbers))} are slow, "
        f"{sum(map(is_flaky, numbers))} fail at first, {missing} are missing.\n"
        "In another terminal, `conveyor ps` shows what runs."
    )
    settings = replace(
        settings, allow_private_targets=True, concurrency=CONCURRENCY, max_inflight=CONCURRENCY
    )
    make_folder(output)
    started_at = time.monotonic()
    ended = run_command(_do, settings, pages, output, console)
    order = ScrapeJob([], output, limits.MAX_ATTEMPTS, as_json)
    code = report(ended, order, time.monotonic() - started_at, console)
    if not ended.was_cut_off and ended.totals.failed != missing:
        raise click.ClickException(f"{missing} pages are missing, {ended.totals.failed} failed.")
    sys.exit(code if ended.was_cut_off else 0)


async def _do(settings: Settings, pages: int, output: Path, console: Console) -> RunSummary:
    async with running_site() as site, running_worker(settings, role="demo") as world:
        job, run = await start_job(
            world.env,
            site.urls(pages),
            concurrency=CONCURRENCY,
            attempts=limits.MAX_ATTEMPTS,
        )
        with progress(console, "Scraping", pages) as show:
            ended = await watch_run(world.env, job, run, show)
        if not ended.was_cut_off:
            await write_results(world.env, ended.run, output)
    return ended


# A small web site on loopback: most pages are quick, some are slow, flaky or missing.
#
# The number of a page determines its behaviour, so that a test can check the summary.


REQUEST_BYTES_MAX = 16_384
SLOW_S = 0.8
QUICK_S = 0.01


def is_missing(number: int) -> bool:
    return number % 50 == 7


def is_flaky(number: int) -> bool:
    return number % 20 == 3


def is_slow(number: int) -> bool:
    return number % 25 == 11


@dataclass(slots=True)
class Site:
    """Serves the pages `/page/<n>` and counts the requests of each."""

    port: int = 0
    asked: Counter[int] = field(default_factory=Counter)

    def urls(self, count: int) -> list[str]:
        return [f"http://127.0.0.1:{self.port}/page/{number}" for number in range(count)]

    async def answer(self, path: str) -> bytes:
        number = _page_number(path)
        if number is None or is_missing(number):
            return _response("404 Not Found", b"<h1>There is no such page</h1>")
        self.asked[number] += 1
        await trio.sleep(SLOW_S if is_slow(number) else QUICK_S)
        if is_flaky(number) and self.asked[number] == 1:
            return _response("503 Service Unavailable", b"<h1>Try again</h1>")
        return _page(number)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serves one connection until the client closes it."""
        rest = b""
        async with stream:
            while True:
                while b"\r\n\r\n" not in rest:
                    data = await stream.receive_some()
                    if not data or len(rest) > REQUEST_BYTES_MAX:
                        return
                    rest += data
                head, _, rest = rest.partition(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode("latin-1")
                await stream.send_all(await self.answer(path))


@asynccontextmanager
async def running_site() -> AsyncGenerator[Site, None]:
    """Runs the site on a free port of this machine until the block ends."""
    site = Site()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    site.port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve_forever, site, listeners)
        yield site
        nursery.cancel_scope.cancel()


async def _serve_forever(site: Site, listeners: list[trio.SocketListener]) -> None:
    async def handle(stream: trio.SocketStream) -> None:
        try:
            await site.serve(stream)
        except trio.BrokenResourceError:
            return  # The client closed the connection.

    await trio.serve_listeners(handle, listeners)


def _page_number(path: str) -> int | None:
    prefix, _, number = path.rpartition("/")
    return int(number) if prefix == "/page" and number.isdigit() else None


@lru_cache(maxsize=256)
def _page(number: int) -> bytes:
    rows = "".join(
        f"<tr><td>{number}-{row}</td><td>{(number * 7919 + row * 104729) % 9973}</td></tr>\n"
        for row in range(400)
    )
    text = f"<!doctype html><title>Page {number}</title><h1>Page {number}</h1><table>{rows}</table>"
    return _response("200 OK", gzip.compress(text.encode(), 1), "Content-Encoding: gzip\r\n")


def _response(status: str, body: bytes, headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body
