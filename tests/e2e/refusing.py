"""A proxy in front of S3 that forwards requests, or refuses them as S3 does if the bucket is
missing or access is denied. (SeaweedFS creates a missing bucket on a write; S3 never does.)"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class RefusingProxy:
    """Runs in `tests.attack.origin.serve`; `refused_count` counts refused requests."""

    upstream: str
    status: str
    code: str
    address: str = "127.0.0.1"
    port: int = 0
    is_refusing: bool = False
    refused_count: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    async def serve(self, stream: trio.SocketStream) -> None:
        server = urlsplit(self.upstream)
        assert server.hostname is not None
        assert server.port is not None
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            upstream = await trio.open_tcp_stream(server.hostname, server.port)
            async with stream, upstream, trio.open_nursery() as nursery:
                nursery.start_soon(self._forward, upstream, stream)
                await self._forward_requests(stream, upstream)
                nursery.cancel_scope.cancel()

    async def _forward_requests(
        self, stream: trio.SocketStream, upstream: trio.SocketStream
    ) -> None:
        async for piece in stream:
            if self.is_refusing:
                await self._refuse(stream, bytes(piece))
                return
            await upstream.send_all(piece)

    async def _refuse(self, stream: trio.SocketStream, request: bytes) -> None:
        """Reads the whole request before the response: a client that still sends gets a reset."""
        while b"\r\n\r\n" not in request or not _is_complete(request):
            piece = await stream.receive_some()
            if not piece:
                return
            request += piece
        self.refused_count += 1
        body = f"<Error><Code>{self.code}</Code><Message>No.</Message></Error>"
        lines = [
            f"HTTP/1.1 {self.status}",
            "Content-Type: application/xml",
            "Connection: close",
            f"Content-Length: {len(body)}",
        ]
        await stream.send_all("\r\n".join([*lines, "", body]).encode())

    async def _forward(self, upstream: trio.SocketStream, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for piece in upstream:
                await stream.send_all(piece)
            await stream.aclose()


def _is_complete(request: bytes) -> bool:
    head, _, body = request.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return length is None or len(body) >= int(length.group(1))
