"""`conveyor demo`: runs a real job of a thousand pages against a bundled site
(docs/operations.md, Roles)."""

from __future__ import annotations

import gzip
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import click
import trio

from conveyor.bootstrap.scrape import DIRECT
from conveyor.cli.scrape.display import Display
from conveyor.cli.scrape.inputs import PageList
from conveyor.cli.scrape.options import ScrapeOptions
from conveyor.cli.scrape.pages import Page
from conveyor.cli.scrape.run import EXIT_INTERRUPTED, Order, run_order
from conveyor.config import Settings

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
    display = Display()
    numbers = range(pages)
    missing = sum(map(is_missing, numbers))
    display.say(
        f"A site on this machine has {pages:,} pages: {sum(map(is_slow, numbers))} are slow, "
        f"{sum(map(is_flaky, numbers))} fail at first, {missing} are missing.\n"
        f"In another terminal, `conveyor ps {output}` shows what runs."
    )
    with site_in_a_thread() as site:
        urls = site.urls(pages)
        order = Order(
            settings=replace(settings, allow_private_targets=True, gateway_url=DIRECT),
            folder=output,
            options=ScrapeOptions(concurrency=CONCURRENCY),
            source="the demo's site",
            page_list=PageList([Page(url) for url in urls], ["127.0.0.1"] * pages),
            processes=1,
            restarts=True,
            as_json=as_json,
        )
        ended = run_order(order, display, time.monotonic())
    if ended.code != EXIT_INTERRUPTED and ended.failed != missing:
        raise click.ClickException(f"{missing} pages are missing, {ended.failed} failed.")
    sys.exit(ended.code if ended.code == EXIT_INTERRUPTED else 0)


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
    request_counts: Counter[int] = field(default_factory=Counter)

    def urls(self, count: int) -> list[str]:
        return [f"http://127.0.0.1:{self.port}/page/{number}" for number in range(count)]

    async def answer(self, path: str) -> bytes:
        number = _page_number(path)
        if number is None or is_missing(number):
            return _response("404 Not Found", b"<h1>There is no such page</h1>")
        self.request_counts[number] += 1
        await trio.sleep(SLOW_S if is_slow(number) else QUICK_S)
        if is_flaky(number) and self.request_counts[number] == 1:
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


@contextmanager
def site_in_a_thread() -> Iterator[Site]:
    """Runs the site in an event loop of its own until the block ends."""
    started: SimpleQueue[tuple[Site, trio.lowlevel.TrioToken, trio.CancelScope]] = SimpleQueue()

    async def serve() -> None:
        with trio.CancelScope() as scope:
            async with running_site() as site:
                started.put((site, trio.lowlevel.current_trio_token(), scope))
                await trio.sleep_forever()

    thread = Thread(target=trio.run, args=(serve,), daemon=True)
    thread.start()
    site, token, scope = started.get()
    try:
        yield site
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()


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
