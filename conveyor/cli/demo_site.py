"""A small web site on loopback to scrape: mostly quick pages, some slow, some flaky, some missing.

What a page does follows from its number, so that a summary can be checked.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import trio

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
    """Pages `/page/<n>`; counts how often each was asked for."""

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
        """One connection, kept alive for as long as the client likes."""
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
    """The site, on a free port of this machine, until the block ends."""
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
            return  # The client hung up.

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
