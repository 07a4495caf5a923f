"""A site of any number of pages with crawler traps: loops, session ids, redirects, duplicates, an
endless calendar, paths that robots.txt forbids, files, and external links. The pages that a crawl
keeps are known exactly."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import trio

BRANCHES = 4
# Every fifth page links to a redirect and to a duplicate: each costs a fetch.
TRAP_EVERY = 5
_HEAD_BYTES_MAX = 16 * 1024
ROBOTS = "User-agent: *\nDisallow: /forbidden/\n"
EXCLUDED = "/calendar"


@dataclass(slots=True)
class TrapSite:
    """Pages `/p/0` to `/p/<pages - 1>`, a tree with links across, and the traps."""

    pages: int
    port: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    sessions: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kept_urls(self) -> set[str]:
        """Returns the URLs of all pages that a crawl keeps and can read."""
        return {f"{self.url}/", *(f"{self.url}/p/{number}" for number in range(self.pages))}

    def failing_urls(self) -> set[str]:
        """Returns the URLs that a crawl keeps and cannot read."""
        return {f"{self.url}/missing/0", f"{self.url}/loop/a"}

    def answer(self, path: str) -> bytes:
        self.requests[path] += 1
        name, _, rest = path.partition("?")[0].removeprefix("/").partition("/")
        number = int(rest) if rest.isdigit() else -1
        match name:
            case "":
                return _page("<a href='p/0'>in</a><a href='/missing/0'>x</a><a href='/loop/a'>")
            case "robots.txt":
                return _response("200 OK", ROBOTS, "text/plain")
            case "sitemap.xml":
                return _response("200 OK", self._sitemap(), "application/xml")
            case "p" if 0 <= number < self.pages:
                return _page(self._links_of(number))
            case "r" if 0 <= number < self.pages:
                return _redirect(f"/p/{number}")
            case "d" if 0 <= number < self.pages:
                # Links of a duplicate would lead to endless duplicates.
                own = f"<link rel=canonical href='/p/{number}'><a href='/d/{number}?again'>again"
                return _page(own)
            case "calendar":
                month = len(path)
                return _page(f"<a href='/calendar/{'1' * month}'>next month</a>")
            case "forbidden":
                return _page(f"<a href='/forbidden/{len(path)}x'>deeper</a>")
            case "loop":
                return _redirect("/loop/b" if rest == "a" else "/loop/a")
            case _:
                return _response("404 Not Found", "<h1>No such page</h1>")

    def _links_of(self, number: int) -> str:
        below = range(number * BRANCHES + 1, number * BRANCHES + BRANCHES + 1)
        across = (number * 7 + 3) % self.pages
        self.sessions += 1
        links = [f"/p/{child}" for child in below if child < self.pages]
        links += [
            f"../p/{number}",  # Itself.
            f"/p/{(number - 1) // BRANCHES}" if number else "/",
            f"/p/{across}?utm_source=trap#part",
            f"/p/{across}?PHPSESSID={self.sessions}",
            f"/p/{across};jsessionid={self.sessions}",
            f"/calendar/{number}",
            f"/forbidden/{number}",
            f"/files/{number}.pdf",
            f"https://elsewhere.example/{number}",
            "mailto:someone@elsewhere.example",
            "javascript:void(0)",
        ]
        if number % TRAP_EVERY == 0:
            links += [f"/r/{across}", f"/d/{across}?b=2&a={number % 3}"]
        anchors = "".join(f"<a href='{link}'>{link}</a>\n" for link in links)
        return f"<!-- <a href='/calendar/comment'> --><script>'<a href=/x>'</script>{anchors}"

    def _sitemap(self) -> str:
        locations = "".join(f"<url><loc>{url}</loc></url>" for url in sorted(self.kept_urls()))
        return f"<urlset>{locations}</urlset>"

    async def serve(self, stream: trio.SocketStream) -> None:
        rest = b""
        async with stream:
            while True:
                while b"\r\n\r\n" not in rest:
                    data = await stream.receive_some()
                    if not data or len(rest) > _HEAD_BYTES_MAX:
                        return
                    rest += data
                head, _, rest = rest.partition(b"\r\n\r\n")
                await stream.send_all(self.answer(head.split(b" ", 2)[1].decode("latin-1")))


def _page(inner: str) -> bytes:
    return _response("200 OK", f"<!doctype html><title>A page</title><body>{inner}</body>")


def _redirect(path: str) -> bytes:
    return _response("302 Found", "", extra=f"Location: {path}\r\n")


def _response(status: str, text: str, kind: str = "text/html", extra: str = "") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{extra}\r\n".encode() + body


@asynccontextmanager
async def _running(site: TrapSite) -> AsyncGenerator[None, None]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    site.port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, _tolerating(site), listeners)
        yield
        nursery.cancel_scope.cancel()


def _tolerating(site: TrapSite) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def serve(stream: trio.SocketStream) -> None:
        # A killed crawler resets its connections.
        try:
            await site.serve(stream)
        except trio.BrokenResourceError:
            return

    return serve


@contextmanager
def a_trap_site(pages: int) -> Iterator[TrapSite]:
    """Runs the site in a separate thread."""
    site, is_up = TrapSite(pages), threading.Event()
    ends: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []

    async def serve() -> None:
        with trio.CancelScope() as scope:
            async with _running(site):
                ends.append((trio.lowlevel.current_trio_token(), scope))
                is_up.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    is_up.wait()
    try:
        yield site
    finally:
        token, scope = ends[0]
        token.run_sync_soon(scope.cancel)
        thread.join()
