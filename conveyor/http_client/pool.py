"""HttpPool: sends requests and returns responses over connections that it keeps and reuses.

The package docstring explains the design. The laws:
- The pool opens a socket only to an address that the policy allowed in the same resolution (or in
  a cached one, which the resolver checked before it stored it).
- A fetch ends within its deadline. A cancelled fetch closes its connection immediately.
- A connection serves one caller. The pool never sends another caller's request on it.
- The pool reuses a connection only if the last response ended exactly at the last byte received.
  Unless the peers are trusted, it does not reuse a connection after a request with a body, after a
  HEAD, or after an interim response. A peer that sent more bytes than one response gets a new
  connection for each request for the next `DISTRUST_S` seconds.
- The pool sends only a GET or HEAD twice, and only if the idle connection was lost before the
  first byte of the response.
- No environment variable sets a proxy.

The connection goes to an address, never to a name: a name would be resolved a second time, without
the check. TLS verifies the certificate against the host name.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from conveyor.domain.submit.target import Target, TargetPolicy
from conveyor.http_client.connection_limits import (
    ConnectionLimits,
    OriginKey,
    OriginPool,
    PoolLimits,
)
from conveyor.http_client.errors import (
    BadResponse,
    ConnectFailed,
    ConnectionLost,
    ConnectTimedOut,
    TimedOut,
    TlsFailed,
    check_descriptors,
)
from conveyor.http_client.exchange import (
    DeadlineTimer,
    Exchange,
    Request,
    Response,
    ResponseParser,
    StreamingResponse,
    Upload,
    encode_request,
    until,
)
from conveyor.http_client.large_bodies import (
    INLINE_CPU_S_MAX,
    INLINE_ENCODED_BYTES_MAX,
    ArrivingBody,
    BodyMemory,
    Decoding,
)
from conveyor.http_client.resolver import Lookup, Resolver
from conveyor.http_client.response_body import EXCERPT_BYTES, WholeBody, excerpt, too_large
from conveyor.http_client.stream import TcpStream, TlsStream, connect
from conveyor.ports.executor import Executor

Connect = Callable[[str, int], Awaitable[socket.socket]]

# Addresses to try for one connection. Each attempt can take the whole connect timeout, so a larger
# value lets a dead host use up the deadline of the fetch; with 1, one dead address loses the host.
ATTEMPTS_MAX = 4
# Bounds the memory. When it is full, the oldest session is dropped and costs a full handshake.
SESSIONS_MAX = 1024


def default_tls() -> ssl.SSLContext:
    """A context that verifies certificates and host names and offers HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Owns the TLS sessions to resume. It does not know the pool.

    A session is resumed only for the caller that it was made for. With a shared session, a site
    would learn that two callers share a machine, and could treat one as the other.
    """

    def __init__(
        self,
        resolver: Resolver,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        connect: Connect = connect,
    ) -> None:
        self._resolver = resolver
        self._connect = connect
        self._tls = tls
        self._timeout_s = connect_timeout_s
        self._sessions: dict[OriginKey, ssl.SSLSession] = {}

    async def dial(
        self, target: Target, partition: str, timeout_s: float | None = None
    ) -> TcpStream | TlsStream:
        addresses = await self._resolver.resolve(target, partition)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        failure: ConnectFailed | TimedOut | None = None
        for address in addresses[:ATTEMPTS_MAX]:
            try:
                with trio.fail_after(timeout_s):
                    return await self._open(target, partition, address)
            except trio.TooSlowError:
                failure = ConnectTimedOut("the connection took too long")
            except ConnectFailed as error:
                failure = error
        assert failure is not None
        raise failure

    def remember(self, target: Target, partition: str, stream: TcpStream | TlsStream) -> None:
        """Stores the TLS session of a connection that has delivered a response.

        In TLS 1.3 the server sends the session ticket after the handshake, so it is not available
        earlier.
        """
        session = stream.session if isinstance(stream, TlsStream) else None
        if session is None:
            return
        key = (partition, target.origin)
        # Remove and insert again, so that the order of the dict is the order of use.
        self._sessions.pop(key, None)
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[key] = session

    async def _open(self, target: Target, partition: str, address: str) -> TcpStream | TlsStream:
        stream = TcpStream(await self._connect(address, target.port))
        if not target.is_tls:
            return stream
        try:
            session = self._sessions.get((partition, target.origin))
            inside = TlsStream(stream, self._context(), target.host, session)
            await inside.start()
        except TlsFailed as error:
            stream.close()
            if error.is_untrusted:
                check_descriptors()  # OpenSSL also reports this when it cannot open a file.
            raise
        except BaseException:
            stream.close()
            raise
        return inside

    def _context(self) -> ssl.SSLContext:
        """Loads the certificates of the authorities for the first https target: it takes 35 ms.

        Without a free descriptor they cannot be read, and this process would trust no certificate
        until it ends. The check comes first for this reason.
        """
        if self._tls is None:
            check_descriptors()
            self._tls = default_tls()
        return self._tls


class HttpPool:
    """The owner calls `close()` after the last fetch has ended. The pool holds sockets and no other
    resource. It decodes large bodies in `executor`, or in the event loop if there is none.
    """

    def __init__(
        self,
        policy: TargetPolicy,
        limits: PoolLimits | None = None,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        connect: Connect = connect,
        executor: Executor | None = None,
    ) -> None:
        limits = limits or PoolLimits()
        self.policy = policy
        self._limits = limits
        self._slots = ConnectionLimits(limits)
        self._timer = DeadlineTimer()
        self._body_memory = BodyMemory(limits)
        self._decoding = Decoding(executor)
        self._resolver = Resolver(policy, lookup)
        self._dialer = Dialer(self._resolver, tls, limits.connect_timeout_s, connect)

    @property
    def idle_count(self) -> int:
        return self._slots.idle_count

    @property
    def origin_count(self) -> int:
        """The number of (caller, origin) pairs that have connections or wait for one."""
        return self._slots.origin_count

    def close(self) -> None:
        self._slots.close_idle()

    async def resolve(self, target: Target, partition: str = "") -> tuple[str, ...]:
        """Returns the addresses that a request to `target` would be sent to.

        Raises ForbiddenTarget, NameNotResolved and OutOfResources.
        """
        return await self._resolver.resolve(target, partition)

    async def fetch(self, request: Request) -> Response:
        """Returns the response, with any status. Raises a subclass of FetchFailed."""
        message = encode_request(request)
        now = trio.current_time()
        deadline = now + request.deadline_s
        key = (request.partition, request.target.origin)
        # The common case takes a slot without an await and without a cancel scope.
        origin = self._slots.acquire_nowait(key)
        if origin is None:
            with until(deadline):
                origin = await self._slots.acquire(key)
            now = trio.current_time()
        try:
            idle = self._slots.pop_idle(origin, now)
            if idle is not None:
                exchange = self._make_exchange(idle, request, deadline)
                try:
                    return await self._exchange(origin, exchange, request, message)
                except ConnectionLost:
                    # A server may close an idle connection at any time. The request is repeated
                    # on a new connection only if a repetition is safe.
                    if exchange.parser.has_started or not request.is_idempotent:
                        raise
            stream = await self._dial(request, deadline)
            exchange = self._make_exchange(stream, request, deadline)
            response = await self._exchange(origin, exchange, request, message)
            # After the response: a TLS 1.3 server sends its session tickets after the handshake.
            self._dialer.remember(request.target, request.partition, stream)
            return response
        finally:
            self._slots.release(origin)

    @asynccontextmanager
    async def open(
        self, request: Request, upload: Upload | None = None
    ) -> AsyncGenerator[StreamingResponse, None]:
        """Yields the response while its body arrives.

        If the caller leaves the block before the end of the body, the connection is closed. An
        `upload` is never sent twice. Raises a subclass of FetchFailed.
        """
        message = encode_request(request, upload.size_bytes if upload else None)
        deadline = trio.current_time() + request.deadline_s
        with until(deadline):
            origin = await self._slots.acquire((request.partition, request.target.origin))
        try:
            exchange = await self._open_response(origin, request, message, deadline, upload)
            try:
                yield StreamingResponse(exchange)
            finally:
                exchange.stop_timer()
                exchange.parser.close()
                self._keep_or_close(origin, exchange, has_body=bool(request.body or upload))
        finally:
            self._slots.release(origin)

    async def _open_response(
        self,
        origin: OriginPool,
        request: Request,
        message: tuple[bytes, ...],
        deadline: float,
        upload: Upload | None,
    ) -> Exchange:
        """Returns an exchange whose response head has arrived, over an idle or a new connection."""
        idle = self._slots.pop_idle(origin, trio.current_time())
        if idle is not None:
            exchange = self._make_exchange(idle, request, deadline)
            try:
                return await _send(exchange, message, upload)
            except ConnectionLost:
                if exchange.parser.has_started or upload is not None or not request.is_idempotent:
                    raise
        stream = await self._dial(request, deadline)
        return await _send(self._make_exchange(stream, request, deadline), message, upload)

    async def _dial(self, request: Request, deadline: float) -> TcpStream | TlsStream:
        with until(deadline):
            # Evict before the connect, so that the new socket stays within `connections_max`.
            self._slots.evict_idle()
            return await self._dialer.dial(
                request.target, request.partition, request.connect_timeout_s
            )

    def _make_exchange(
        self, stream: TcpStream | TlsStream, request: Request, deadline: float
    ) -> Exchange:
        parser = ResponseParser(has_body=request.method != "HEAD")
        wait_s = request.read_timeout_s
        if wait_s is None:
            wait_s = self._limits.read_timeout_s
        return Exchange(stream, parser, self._timer, deadline=deadline, wait_s=wait_s)

    async def _exchange(
        self, origin: OriginPool, exchange: Exchange, request: Request, message: tuple[bytes, ...]
    ) -> Response:
        stream, parser = exchange.stream, exchange.parser
        try:
            await exchange.send(message)
            if request.wants_body(parser.status):
                response = await self._whole(exchange, request)
            else:
                exchange.require_rate(self._limits.body_rate_min)
                response = await _excerpt_response(exchange)
        except BaseException:
            # Cancellation included: a connection in the middle of a response is never reused.
            stream.close()
            raise
        finally:
            exchange.stop_timer()
            parser.close()
        self._keep_or_close(origin, exchange, has_body=bool(request.body))
        return response

    def _keep_or_close(self, origin: OriginPool, exchange: Exchange, *, has_body: bool) -> None:
        # The peer may still send bytes that the next request would read as its response.
        may_owe_bytes = (has_body or exchange.parser.has_oddities) and not self._limits.trusts_peers
        if exchange.parser.is_reusable and not exchange.is_early and not may_owe_bytes:
            self._slots.return_connection(origin, exchange.stream)
            return
        exchange.stream.close()
        if exchange.parser.has_surplus:
            self._slots.distrust(origin)

    async def _whole(self, exchange: Exchange, request: Request) -> Response:
        parser = exchange.parser
        if parser.is_done and not parser.encodings:
            # Most pages arrive in one read together with their head. They need no WholeBody.
            page = parser.take()
            if len(page) <= request.body_bytes_max:
                return Response(parser.status, parser.headers, page)
            raise too_large(request.body_bytes_max)
        body = WholeBody(parser.encodings, request.body_bytes_max)
        # Refuse an announced length before the first read: the transfer would be wasted.
        body.expect(parser.content_length)
        exchange.require_rate(self._limits.body_rate_min)
        memory = ArrivingBody(
            self._body_memory, request.partition, exchange, _bytes_max(parser, request)
        )
        try:
            while True:
                data = parser.take()
                if data and body.add(data):
                    await self._decode(body, exchange, request.partition, memory)
                if parser.is_done:
                    break
                size_bytes = max(body.size, body.encoded_bytes)
                if size_bytes > memory.covered_bytes:
                    await memory.grow(size_bytes)
                await exchange.read_more()
            page = body.finish()
            memory.close(request.memory, len(page))
        finally:
            memory.close()
        return Response(parser.status, parser.headers, page)

    async def _decode(
        self, body: WholeBody, exchange: Exchange, partition: str, memory: ArrivingBody
    ) -> None:
        """Decodes the added bytes: a small page in the event loop, a larger one in the executor."""
        is_small = body.encoded_bytes <= INLINE_ENCODED_BYTES_MAX
        if is_small and not body.decode_step(INLINE_CPU_S_MAX):
            return
        # Decoding is not a wait for the peer: the timer stops, and `excuse` below subtracts the
        # time from the peer's minimum rate.
        exchange.stop_timer()
        begun_at = trio.current_time()
        is_more = True
        while is_more:
            if body.size > memory.covered_bytes:
                await memory.grow(body.size)
            with until(exchange.deadline):
                is_more = await self._decoding.run(partition, body.decode_step)
        exchange.excuse(trio.current_time() - begun_at)


def _bytes_max(parser: ResponseParser, request: Request) -> int:
    """Returns the most bytes that the decoded body has."""
    if parser.content_length is None or parser.encodings:
        return request.body_bytes_max
    return parser.content_length


async def _send(exchange: Exchange, message: tuple[bytes, ...], upload: Upload | None) -> Exchange:
    try:
        await exchange.send(message, upload)
    except BaseException:
        exchange.stop_timer()
        exchange.parser.close()
        exchange.stream.close()
        raise
    exchange.stop_timer()
    return exchange


async def _excerpt_response(exchange: Exchange) -> Response:
    """Reads at most the first 64 KiB of a body that the caller does not want.

    If the body ends within this size, the connection can be reused.
    """
    parser = exchange.parser
    encoded = parser.take()
    try:
        while not parser.is_done and len(encoded) <= EXCERPT_BYTES:
            await exchange.read_more()
            encoded += parser.take()
    except (ConnectionLost, BadResponse):
        pass  # The status is known. The excerpt is optional, so its loss is no error.
    # Most of these bodies are answers to webhooks, which are not encoded and need no decoder.
    body = excerpt(parser.encodings, encoded) if parser.encodings else encoded[:EXCERPT_BYTES]
    return Response(parser.status, parser.headers, body, is_whole=parser.is_done)
