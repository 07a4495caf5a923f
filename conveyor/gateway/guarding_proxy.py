"""GuardingProxy: the only way of a browser into the network (docs/gateway.md, SSRF).

Each page has a port of its own on loopback, which closes with the page. The proxy resolves a name
once, checks every address, and connects to exactly a checked address, as plain fetches do. The
check therefore covers everything that a page loads: redirects, frames, workers, WebSockets and
whatever a later release of the browser adds.

An https page is a tunnel, so the proxy sees only its host. Of a plain http request it reads the
head, and sends it with `Connection: close`: each request has a connection of its own, whose bytes
can only reach the address that was checked for it. The response gets the same header, because the
browser would otherwise send its next request on the connection. A refused request is answered by
closing the connection, so that no page can read the refusal; the call learns the reason from
`failures`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from conveyor.domain.submit.target import BadUrl, Target, TargetPolicy, parse_url
from conveyor.http_client.errors import (
    BadRequest,
    ConnectFailed,
    ConnectTimedOut,
    FetchFailed,
    ForbiddenTarget,
)
from conveyor.http_client.resolver import Lookup, Resolver
from conveyor.http_client.stream import Connect, connect

CONNECT_S = 10.0
# Addresses to try for one connection, as for plain fetches.
ATTEMPTS_MAX = 4
HEAD_BYTES_MAX = 64 * 1024
HEAD_S = 10.0
# The whole page with images, fonts and data. A page that loads more would fill memory and time.
PAGE_BYTES_MAX = 256 * 1024 * 1024
# Chromium itself opens at most 32 at a time to one proxy.
CONNECTIONS_MAX = 256
READ_BYTES = 64 * 1024
BACKLOG = 128

_CONNECT = re.compile(rb"CONNECT ([\x21-\x7e]{1,300}) HTTP/1\.1")
_PLAIN = re.compile(rb"([A-Z]{3,10}) http://([^/?#\s]{1,300})([/?][\x21-\x7e]*)? HTTP/1\.1")
_INTERIM = re.compile(rb"HTTP/1\.[01] 1[0-9][0-9]")
# Chromium's headers for the proxy, and the one that is written anew.
_OF_THE_PROXY = (b"proxy-", b"connection:", b"keep-alive:")
_TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"

Dial = Callable[[Target], Awaitable[trio.SocketStream]]


class GuardingProxy:
    def __init__(
        self, policy: TargetPolicy, *, lookup: Lookup | None = None, connect: Connect = connect
    ) -> None:
        self._resolver = Resolver(policy, lookup)
        self._connect = connect

    @asynccontextmanager
    async def open_port(
        self, nursery: trio.Nursery, partition: str, dial: Dial | None = None
    ) -> AsyncGenerator[ProxyPort, None]:
        """Opens the port of one page; its connections run in `nursery` and end with the block.
        `dial` replaces how it connects, for a page that goes through another proxy."""

        async def dial_checked(target: Target) -> trio.SocketStream:
            return await self._dial(target, partition)

        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=BACKLOG)
        port = ProxyPort(listener.socket.getsockname()[1], dial or dial_checked)
        async with listener:
            nursery.start_soon(port.accept, listener)
            try:
                yield port
            finally:
                port.close()

    async def _dial(self, target: Target, partition: str) -> trio.SocketStream:
        failure: FetchFailed = ConnectFailed("no address")
        for address in (await self._resolver.resolve(target, partition))[:ATTEMPTS_MAX]:
            try:
                with trio.fail_after(CONNECT_S):
                    connected = await self._connect(address, target.port)
            except trio.TooSlowError:
                failure = ConnectTimedOut("the connection took too long")
            except ConnectFailed as error:
                failure = error
            else:
                return trio.SocketStream(trio.socket.from_stdlib_socket(connected))
        raise failure


class ProxyPort:
    """The port of one page. `failures` has the last failure of each host."""

    def __init__(self, number: int, dial: Dial) -> None:
        self.url = f"http://127.0.0.1:{number}"
        self.failures: dict[tuple[str, int], FetchFailed] = {}
        self._dial = dial
        self._bytes_left = PAGE_BYTES_MAX
        self._connections = trio.CapacityLimiter(CONNECTIONS_MAX)
        self._scope = trio.CancelScope()

    async def accept(self, listener: trio.SocketListener) -> None:
        with self._scope:
            await trio.serve_listeners(self._converse, [listener])

    def close(self) -> None:
        self._scope.cancel()

    async def _converse(self, client: trio.SocketStream) -> None:
        try:
            async with self._connections:
                await self._forward(client)
        except* (
            FetchFailed,
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
        ):
            pass  # Closing the connection is the answer.

    async def _forward(self, client: trio.SocketStream) -> None:
        with trio.fail_after(HEAD_S):
            head, rest = await _read_head(client)
        if match := _CONNECT.fullmatch(head.partition(b"\r\n")[0]):
            async with await self._reach("https", match[1]) as upstream:
                await client.send_all(_TUNNEL_OPEN)
                await upstream.send_all(rest)
                await self._relay(client, upstream)
            return
        authority, request = _plain_request(head)
        async with await self._reach("http", authority) as upstream:
            await upstream.send_all(request + rest)
            await self._relay(client, upstream, _pass_response_head)

    async def _reach(self, scheme: str, authority: bytes) -> trio.SocketStream:
        target = parse_url(f"{scheme}://{authority.decode('ascii')}/")
        if isinstance(target, BadUrl):
            raise ForbiddenTarget("the host is not one that may be fetched")
        try:
            return await self._dial(target)
        except FetchFailed as error:
            self.failures[target.host, target.port] = error
            raise

    async def _relay(
        self,
        client: trio.SocketStream,
        upstream: trio.SocketStream,
        begin: Callable[[trio.SocketStream, trio.SocketStream], Awaitable[None]] | None = None,
    ) -> None:
        """Copies in both directions. `begin` passes on the start of the response."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, client, upstream)
            if begin is not None:
                await begin(upstream, client)
            await self._copy(upstream, client)
            # The site has sent everything. What the browser still sends has no reader.
            nursery.cancel_scope.cancel()

    async def _copy(self, source: trio.SocketStream, to: trio.SocketStream) -> None:
        while data := await source.receive_some(READ_BYTES):
            self._bytes_left -= len(data)
            if self._bytes_left < 0:
                raise BadRequest("the page loads too much")
            await to.send_all(data)
        await to.send_eof()


async def _read_head(stream: trio.SocketStream, data: bytes = b"") -> tuple[bytes, bytes]:
    """Returns the next head without its empty line, and the bytes that follow it. `data` has
    arrived already."""
    buffer = bytearray(data)
    while (end := buffer.find(b"\r\n\r\n")) < 0:
        if len(buffer) > HEAD_BYTES_MAX:
            raise BadRequest("the head is too long")
        piece = await stream.receive_some(READ_BYTES)
        if not piece:
            raise BadRequest("the head is not complete")
        buffer += piece
    return bytes(buffer[:end]), bytes(buffer[end + 4 :])


async def _pass_response_head(upstream: trio.SocketStream, client: trio.SocketStream) -> None:
    """Passes on the head of the final response, with `Connection: close`. Interim responses are
    dropped."""
    head, rest = await _read_head(upstream)
    while _INTERIM.match(head):
        head, rest = await _read_head(upstream, rest)
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(_OF_THE_PROXY)]
    await client.send_all(b"\r\n".join([*lines, b"Connection: close", b"", rest]))


def _plain_request(head: bytes) -> tuple[bytes, bytes]:
    """Returns the authority of a request to a proxy, and the request as its site expects it."""
    request_line, *lines = head.split(b"\r\n")
    match = _PLAIN.fullmatch(request_line)
    if match is None:
        raise BadRequest("not a request to a proxy")
    method, authority, path = match.groups()
    path = path or b"/"
    if path.startswith(b"?"):
        path = b"/" + path
    lines_left = [line for line in lines if not line.lower().startswith(_OF_THE_PROXY)]
    first = b"%s %s HTTP/1.1" % (method, path)
    return authority, b"\r\n".join([first, *lines_left, b"Connection: close", b"", b""])
