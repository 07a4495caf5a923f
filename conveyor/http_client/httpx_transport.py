"""An httpx transport over the pool: the same SSRF guard and limits behind the API of httpx.

Bodies are passed on as they arrive. This module decodes them under the size limit and removes
Content-Encoding and the length headers, because httpx would decode again, without a limit. Of the
timeouts of httpx, `connect` and `read` are used, each for one wait. Writes use the `read` timeout.
A wait for a slot of the pool ends at the deadline.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx

from conveyor.domain import limits
from conveyor.domain.submit.target import Target, parse_url
from conveyor.http_client.errors import (
    BodyTooLarge,
    ConnectFailed,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    TimedOut,
    TlsFailed,
)
from conveyor.http_client.exchange import Request, StreamingResponse, Upload
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.response_body import decoder_for

# Request headers that the pool writes itself.
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
# Response headers that are wrong once the body is decoded.
_OF_THE_WIRE = frozenset({b"content-encoding", b"content-length", b"transfer-encoding"})
# Not limits.URL_CHARS_MAX: that limit is for the URLs of tasks.
_URL_CHARS_MAX = 65536


class PoolTransport(httpx.AsyncBaseTransport):
    """Closing the httpx client closes the idle connections of the pool."""

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
        body, upload = await _content_of(request)
        timeouts: dict[str, Any] = request.extensions.get("timeout", {})
        pool_request = Request(
            method=request.method,
            target=target,
            headers=[
                header for header in request.headers.multi_items() if header[0].lower() not in _OURS
            ],
            body=body,
            deadline_s=self._deadline_s,
            connect_timeout_s=timeouts.get("connect"),
            read_timeout_s=timeouts.get("read"),
        )
        opened = AsyncExitStack()
        async with _letting_go(upload):
            with _translating(request):
                incoming = await opened.enter_async_context(self._pool.open(pool_request, upload))
        headers = [pair for pair in incoming.headers if pair[0] not in _OF_THE_WIRE]
        stream = _Body(request, opened, incoming, self._body_bytes_max)
        return httpx.Response(incoming.status, headers=headers, stream=stream)

    async def aclose(self) -> None:
        self._pool.close()


class _Body(httpx.AsyncByteStream):
    """A body that is still arriving. httpx closes it at its end or when the caller drops it."""

    def __init__(
        self,
        request: httpx.Request,
        opened: AsyncExitStack,
        incoming: StreamingResponse,
        bytes_max: int,
    ) -> None:
        self._request = request
        self._opened = opened
        self._incoming = incoming
        self._bytes_max = bytes_max

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        with _translating(self._request):
            encodings = [v for name, v in self._incoming.headers if name == b"content-encoding"]
            decoder, size_bytes = None, 0
            async for data in self._incoming:
                decoder = decoder or decoder_for(encodings, self._bytes_max)
                for piece in decoder.decode(data) if decoder else (data,):
                    size_bytes += len(piece)
                    if size_bytes > self._bytes_max:
                        raise BodyTooLarge(f"the body is larger than {self._bytes_max} bytes")
                    yield piece
            if decoder is not None:
                decoder.finish()

    async def aclose(self) -> None:
        await self._opened.aclose()


@asynccontextmanager
async def _letting_go(upload: Upload | None) -> AsyncGenerator[None, None]:
    """Closes the generator of the pieces: the peer may have stopped reading before its end."""
    try:
        yield
    finally:
        if upload is not None and isinstance(upload.pieces, AsyncGenerator):
            await upload.pieces.aclose()


async def _content_of(request: httpx.Request) -> tuple[bytes | None, Upload | None]:
    """Returns the body as bytes, or as an Upload if it is a stream of known length."""
    length = request.headers.get("content-length")
    if length is None or isinstance(request.stream, httpx.ByteStream):
        return await request.aread() or None, None
    assert isinstance(request.stream, httpx.AsyncByteStream)
    return None, Upload(aiter(request.stream), int(length))


@contextmanager
def _translating(request: httpx.Request) -> Iterator[None]:
    try:
        yield
    except FetchFailed as error:
        raise _to_httpx_error(error, request) from error


def _to_httpx_error(error: FetchFailed, request: httpx.Request) -> httpx.TransportError:
    match error:
        case TimedOut():
            return httpx.ReadTimeout(error.detail, request=request)
        case ConnectFailed() | NameNotResolved() | TlsFailed() | ForbiddenTarget():
            return httpx.ConnectError(error.detail, request=request)
        case _:
            return httpx.RemoteProtocolError(error.detail, request=request)
