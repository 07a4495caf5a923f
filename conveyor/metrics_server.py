"""Monitoring: serves metrics and health of a process without an API, over HTTP
(docs/operations.md, Endpoints for operators).

It is for metric scrapers and health checks inside the operator's network. Each connection serves
one request and is then closed. The responses name no caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import trio
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from conveyor import __version__
from conveyor.telemetry import Metrics

log = logging.getLogger(__name__)

# A scraper sends a short head and reads quickly. Larger values let a client hold memory or a
# descriptor for longer.
REQUEST_BYTES_MAX = 8192
CONVERSE_S = 5.0
_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Answers `/metrics`, `/healthz` and `/readyz` until it is cancelled."""

    metrics: Metrics
    host: str
    port: int
    build: str = "unknown"
    is_ready: Callable[[], bool] = lambda: True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(self.port, host=self.host)
        port = listeners[0].socket.getsockname()[1]
        log.info("metrics server listening", extra={"url": f"http://{self.host}:{port}/metrics"})
        task_status.started()
        await trio.serve_listeners(self._converse, listeners)

    async def _converse(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(CONVERSE_S), suppress(trio.BrokenResourceError):
            request = await _head_of(stream)
            await stream.send_all(self._answer(request))
            await stream.send_eof()
            # Wait until the client closes: then it has read the whole response.
            async for _ in stream:
                pass

    def _answer(self, request: bytes) -> bytes:
        match request.split(b"\r\n", 1)[0].split(b" "):
            case [b"GET" | b"HEAD", b"/metrics", _]:
                body, kind = generate_latest(self.metrics.registry), CONTENT_TYPE_PLAIN_0_0_4
                return _reply(request, "200 OK", kind, body)
            case [b"GET" | b"HEAD", b"/healthz", _]:
                return _reply(request, "200 OK", _JSON, _health(self.build))
            case [b"GET" | b"HEAD", b"/readyz", _] if self.is_ready():
                return _reply(request, "200 OK", _JSON, b'{"status":"ready"}')
            case [b"GET" | b"HEAD", b"/readyz", _]:
                return _reply(request, "503 Service Unavailable", _JSON, b'{"status":"draining"}')
            case [b"GET" | b"HEAD", _, _]:
                return _reply(request, "404 Not Found", "text/plain", b"not here\n")
            case _:
                return _reply(request, "400 Bad Request", "text/plain", b"not understood\n")


def _health(build: str) -> bytes:
    return msgspec.json.encode({"status": "ok", "version": __version__, "build": build})


async def _head_of(stream: trio.SocketStream) -> bytes:
    """Reads the head of a request, or a part of it. It does not wait for a body."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < REQUEST_BYTES_MAX:
        piece = await stream.receive_some(REQUEST_BYTES_MAX)
        if not piece:
            break
        head += piece
    return head


def _reply(request: bytes, status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    content = b"" if request.startswith(b"HEAD ") else body
    return f"{head}Connection: close\r\n\r\n".encode() + content
