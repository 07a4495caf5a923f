"""A proxy in front of S3: each request passes, or each is refused as S3 refuses without a bucket or
without rights. (SeaweedFS makes a bucket that is written to and missing, which S3 never does.)"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class RefusingProxy:
    """Served by `tests.attack.origin.serve`; `refused_count` counts the requests it refused."""

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
                nursery.start_soon(self._pass_on, upstream, stream)
                await self._hear(stream, upstream)
                nursery.cancel_scope.cancel()

    async def _hear(self, stream: trio.SocketStream, upstream: trio.SocketStream) -> None:
        async for piece in stream:
            if self.is_refusing:
                await self._refuse(stream, bytes(piece))
                return
            await upstream.send_all(piece)

    async def _refuse(self, stream: trio.SocketStream, heard: bytes) -> None:
        """Reads the request to its end first: a client that still sends would see a reset."""
        while b"\r\n\r\n" not in heard or not _is_whole(heard):
            piece = await stream.receive_some()
            if not piece:
                return
            heard += piece
        self.refused_count += 1
        body = f"<Error><Code>{self.code}</Code><Message>No.</Message></Error>"
        lines = [
            f"HTTP/1.1 {self.status}",
            "Content-Type: application/xml",
            "Connection: close",
            f"Content-Length: {len(body)}",
        ]
        await stream.send_all("\r\n".join([*lines, "", body]).encode())

    async def _pass_on(self, upstream: trio.SocketStream, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for piece in upstream:
                await stream.send_all(piece)
            await stream.aclose()


def _is_whole(request: bytes) -> bool:
    head, _, body = request.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return length is None or len(body) >= int(length.group(1))
