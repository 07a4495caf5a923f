"""The pool behind an httpx client: the same guard and limits for whoever prefers that API.

Bodies are read whole and decoded here, under the cap, so Content-Encoding and the lengths of the
wire are dropped: httpx would decode again, without a cap.
"""

from __future__ import annotations

import httpx

from conveyor.domain import limits
from conveyor.domain.urls import Target, parse_url
from conveyor.net.errors import (
    ConnectFailed,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    TimedOut,
    TlsFailed,
)
from conveyor.net.message import Request
from conveyor.net.pool import HttpPool

# Set by the pool itself, or gone once the body is decoded.
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_OF_THE_WIRE = frozenset({b"content-encoding", b"content-length", b"transfer-encoding"})
_URL_CHARS_MAX = 65536


class PoolTransport(httpx.AsyncBaseTransport):
    """Closing the client closes idle connections of the pool."""

    def __init__(
        self,
        pool: HttpPool,
        *,
        deadline_s: float = 30.0,
        body_bytes_max: int = limits.BODY_BYTES_MAX,
    ) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._body_bytes_max = body_bytes_max

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        target = parse_url(str(request.url), chars_max=_URL_CHARS_MAX)
        if not isinstance(target, Target):
            raise httpx.UnsupportedProtocol(target.detail, request=request)
        body = await request.aread()
        headers = [pair for pair in request.headers.multi_items() if pair[0].lower() not in _OURS]
        try:
            response = await self._pool.fetch(
                Request(
                    method=request.method,
                    target=target,
                    headers=headers,
                    body=body or None,
                    deadline_s=self._deadline_s,
                    body_bytes_max=self._body_bytes_max,
                )
            )
        except FetchFailed as error:
            raise _translated(error, request) from error
        kept = [pair for pair in response.headers if pair[0] not in _OF_THE_WIRE]
        return httpx.Response(response.status, headers=kept, content=response.body)

    async def aclose(self) -> None:
        self._pool.close()


def _translated(error: FetchFailed, request: httpx.Request) -> httpx.TransportError:
    match error:
        case TimedOut():
            return httpx.ReadTimeout(error.detail, request=request)
        case ConnectFailed() | NameNotResolved() | TlsFailed() | ForbiddenTarget():
            return httpx.ConnectError(error.detail, request=request)
        case _:
            return httpx.RemoteProtocolError(error.detail, request=request)
