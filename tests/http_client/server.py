"""A small raw server on loopback: each connection runs a script of reads and exact bytes."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio


@dataclass
class Peer:
    """One accepted connection on the side of the server."""

    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]
    server: RawServer
    _buffer: bytes = b""

    async def request(self) -> bytes:
        """Returns the next request with its body; empty at the end of the stream."""
        while b"\r\n\r\n" not in self._buffer:
            if not await self._read():
                return b""
        head, _, rest = self._buffer.partition(b"\r\n\r\n")
        length = _content_length(head)
        while len(rest) < length:
            if not await self._read():
                return b""
            rest = self._buffer.partition(b"\r\n\r\n")[2]
        self._buffer = rest[length:]
        whole = head + b"\r\n\r\n" + rest[:length]
        self.server.requests.append(whole)
        return whole

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def wait_closed(self) -> None:
        """Waits until the client closes the connection."""
        while await self.stream.receive_some(65536):
            pass

    def abort(self) -> None:
        """Closes the connection with a reset."""
        assert isinstance(self.stream, trio.SocketStream)
        linger = struct.pack("ii", 1, 0)
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def _read(self) -> bool:
        data = await self.stream.receive_some(65536)
        self._buffer += data
        return bool(data)


Handler = Callable[[Peer], Awaitable[None]]


@dataclass
class RawServer:
    port: int
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    closed: int = 0

    def url(self, path: str = "/", scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.port}{path}"


class Serving:
    """Serves until the block ends. An error of the block is raised as it is, not within a group."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None) -> None:
        self._handler = handler
        self._tls = tls
        self._nurseries = trio.open_nursery()

    async def __aenter__(self) -> RawServer:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self._server = RawServer(listeners[0].socket.getsockname()[1])
        self._nursery = await self._nurseries.__aenter__()
        self._nursery.start_soon(trio.serve_listeners, self._serve, listeners)
        return self._server

    async def __aexit__(self, *_error: object) -> None:
        self._nursery.cancel_scope.cancel()
        await self._nurseries.__aexit__(None, None, None)

    async def _serve(self, accepted: trio.SocketStream) -> None:
        server = self._server
        server.connections += 1
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = accepted
        if self._tls is not None:
            stream = trio.SSLStream(accepted, self._tls, server_side=True, https_compatible=True)
        try:
            async with stream:
                await self._handler(Peer(stream, server))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # A client may close its connection at any point of the script.
        finally:
            server.closed += 1


def raw_server(handler: Handler, tls: ssl.SSLContext | None = None) -> Serving:
    return Serving(handler, tls)


def answering(*replies: bytes) -> Handler:
    """Answers the nth request of every connection with the nth of `replies`, and later ones with
    the last."""

    async def handler(peer: Peer) -> None:
        index = 0
        while await peer.request():
            await peer.send(replies[min(index, len(replies) - 1)])
            index += 1

    return handler


def answering_then_closing(reply: bytes) -> Handler:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)

    return handler


def by_path(replies: dict[str, bytes]) -> Handler:
    """Answers by the path of the request line."""

    async def handler(peer: Peer) -> None:
        while request := await peer.request():
            await peer.send(replies[request.split(b" ")[1].decode()])

    return handler


def reply(
    body: bytes = b"", status: str = "200 OK", headers: dict[str, str] | None = None
) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*chunks: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{headers}\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (*chunks, b""))


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
