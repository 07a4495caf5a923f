"""A site with well-behaved paths and with hostile ones.

| path | behaviour |
|---|---|
| `/page/N` | a small page that contains its path |
| `/slow/N` | the same, after half a second |
| `/silent` | accepts the request and never answers |
| `/drip` | announces 2 MB and sends a byte every five seconds |
| `/stall` | announces 20 MB, sends 1.5 MB at once and then a byte every five seconds |
| `/large` | 2 MB at once |
| `/encoded?kind=K` | 5 MB that take long to decode and contain almost no data, see `NO_OUTPUT` |
| `/ignores-body` | answers first, and then treats the request's body as another request |
| `/late` | answers twice: the second response arrives 0.3 s after the first |
| `/redirect?to=URL&status=N` | redirects to that URL with status N, by default 307 |
| `/echo` | the request's own head and body |
"""

from __future__ import annotations

import gzip
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import trio

HEAD_BYTES_MAX = 65_536
LARGE_BYTES = 2_000_000
ENCODED_BYTES = 5_000_000
# Bodies that cost CPU time and decode to almost nothing: encoding, start, repeated part.
NO_OUTPUT = {
    "zstd-frames": ("zstd", b"", bytes.fromhex("28b52ffd2000010000")),
    "gzip-members": ("gzip", b"", gzip.compress(b"")),
    "skippable-frames": ("zstd", b"", bytes.fromhex("502a4d1800000000")),
    "zstd-blocks": ("zstd", bytes.fromhex("28b52ffd2010"), bytes(3)),
    "small-members": ("gzip", b"", gzip.compress(b"x")),
    "gzip-name": ("gzip", bytes.fromhex("1f8b0808000000000003"), b"n" * 100),
    "stored-blocks": ("deflate", b"", b"\0\0\0\xff\xff"),
    "fixed-blocks": ("deflate", b"", bytes.fromhex("02082080000208208000")),
    "brotli-metadata": ("br", b"\x0c", b"\x06"),
}
STALL_BYTES = 1_500_000
DRIP_S = 5.0
LATE_S = 0.3
SLOW_S = 0.5


def response(
    body: bytes, *headers: str, status: str = "200 OK", length: int | None = None
) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        "Content-Type: text/html",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(slots=True)
class Request:
    method: str
    path: str
    head: bytes
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))


@dataclass(slots=True)
class Site:
    """A running site: the requests that it received, and how many were open at the same time."""

    address: str
    port: int = 0
    request_counts: Counter[str] = field(default_factory=Counter)
    requests: list[Request] = field(default_factory=list)
    open_count: int = 0
    open_count_max: int = 0

    def url(self, path: str, host: str | None = None) -> str:
        port = "" if self.port == 80 else f":{self.port}"
        return f"http://{host or self.address}{port}{path}"

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                rest = b""
                while True:
                    request, rest = await _read_request(stream, rest)
                    if request is None or not await self._answer(request, stream):
                        return
                    if request.path.startswith("/ignores-body"):
                        rest = request.body + rest

    async def _answer(self, request: Request, stream: trio.SocketStream) -> bool:
        """Answers a request. Returns whether the connection stays open."""
        name = request.path.partition("?")[0]
        self.request_counts[name] += 1
        self.requests.append(request)
        self.open_count += 1
        self.open_count_max = max(self.open_count_max, self.open_count)
        try:
            return await self._behave(name, request, stream)
        finally:
            self.open_count -= 1

    async def _behave(self, name: str, request: Request, stream: trio.SocketStream) -> bool:
        match name:
            case "/silent":
                await _wait_closed(stream)
                return False
            case "/drip" | "/stall":
                start = (LARGE_BYTES, 0) if name == "/drip" else (10 * LARGE_BYTES, STALL_BYTES)
                await stream.send_all(response(b"", length=start[0]) + b"x" * start[1])
                while True:
                    await trio.sleep(DRIP_S)
                    await stream.send_all(b".")
            case "/large":
                await stream.send_all(response(b"x" * LARGE_BYTES))
            case "/encoded":
                await stream.send_all(_encode(request.query["kind"]))
            case "/delayed":
                await trio.sleep(LATE_S)
                await stream.send_all(response(b"<h1>planted by the attacker</h1>"))
            case "/late":
                await stream.send_all(response(_page(request)))
                await trio.sleep(LATE_S)
                await stream.send_all(response(b"<h1>planted by the attacker</h1>"))
            case "/redirect":
                await stream.send_all(_redirect(request))
            case _ if name.startswith("/slow/"):
                await trio.sleep(SLOW_S)
                await stream.send_all(response(_page(request)))
            case "/echo":
                await stream.send_all(response(request.head + request.body))
            case _:
                await stream.send_all(response(_page(request)))
        return True


def _encode(kind: str) -> bytes:
    encoding, start, unit = NO_OUTPUT[kind]
    body = start + unit * (ENCODED_BYTES // len(unit))
    return response(body, f"Content-Encoding: {encoding}")


def _redirect(request: Request) -> bytes:
    # The target may have a query of its own, so it is not taken from the parsed query.
    to, _, status = request.path.partition("?to=")[2].rpartition("&status=")
    return response(b"", f"Location: {to or status}", status=f"{status if to else 307} Go")


def _page(request: Request) -> bytes:
    return f"<h1>the page {request.path}</h1>".encode()


async def _wait_closed(stream: trio.SocketStream) -> None:
    while await stream.receive_some(4096):
        pass


async def _read_request(stream: trio.SocketStream, rest: bytes) -> tuple[Request | None, bytes]:
    while b"\r\n\r\n" not in rest:
        data = await stream.receive_some(HEAD_BYTES_MAX)
        if not data or len(rest) > HEAD_BYTES_MAX:
            return None, b""
        rest += data
    head, rest = rest.split(b"\r\n\r\n", 1)
    method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    length = 0
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == b"content-length":
            length = int(value)
    while len(rest) < length:
        data = await stream.receive_some(HEAD_BYTES_MAX)
        if not data:
            return None, b""
        rest += data
    return Request(method, path, head, rest[:length]), rest[length:]


@contextmanager
def serve(site: Site, port: int | None) -> Iterator[Site]:
    """Serves `site` from a separate thread until the block ends."""
    is_ready = threading.Event()
    handles: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []

    async def run() -> None:
        with trio.CancelScope() as scope:
            listeners = await trio.open_tcp_listeners(port or 0, host=site.address, backlog=2048)
            site.port = listeners[0].socket.getsockname()[1]
            handles.append((trio.lowlevel.current_trio_token(), scope))
            is_ready.set()
            await trio.serve_listeners(site.serve, listeners)

    thread = threading.Thread(target=trio.run, args=(run,), daemon=True)
    thread.start()
    assert is_ready.wait(10)
    try:
        yield site
    finally:
        token, scope = handles[0]
        token.run_sync_soon(scope.cancel)
        thread.join(10)


def wait_until(what: str, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(0.02)
