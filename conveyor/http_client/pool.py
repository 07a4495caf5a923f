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
- The pool sends only a GET or HEAD twice, and only if the kept connection was lost before the
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
    ResponseParser,
    StreamingResponse,
    until,
)
from conveyor.http_client.large_bodies import (
    INLINE_CPU_S_MAX,
    INLINE_ENCODED_BYTES_MAX,
    Decoding,
    LargeBodies,
    LargeBody,
)
from conveyor.http_client.request import Request, Response, Upload, encode_request
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

    def remember(self, target: Target, partition: str, wire: TcpStream | TlsStream) -> None:
        """Stores the TLS session of a connection that has delivered a response.

        In TLS 1.3 the server sends the session ticket after the handshake, so it is not available
        earlier.
        """
        session = wire.session if isinstance(wire, TlsStream) else None
        if session is None:
            return
        key = (partition, target.origin)
        # Remove and insert again, so that the order of the dict is the order of use.
        self._sessions.pop(key, None)
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[key] = session

    async def _open(self, target: Target, partition: str, address: str) -> TcpStream | TlsStream:
        wire = TcpStream(await self._connect(address, target.port))
        if not target.is_tls:
            return wire
        try:
            session = self._sessions.get((partition, target.origin))
            inside = TlsStream(wire, self._context(), target.host, session)
            await inside.start()
        except TlsFailed as error:
            wire.close()
            if error.is_untrusted:
                check_descriptors()  # OpenSSL also reports this when it cannot open a file.
            raise
        except BaseException:
            wire.close()
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
        self._watch = DeadlineTimer()
        self._large = LargeBodies(limits)
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
        head = encode_request(request)
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
            kept = self._slots.pop_idle(origin, now)
            if kept is not None:
                reading = self._reading(kept, request, deadline)
                try:
                    return await self._exchange(origin, reading, request, head)
                except ConnectionLost:
                    # A server may close an idle connection at any time. The request is repeated
                    # on a new connection only if a repetition is safe.
                    if reading.reply.has_started or not request.is_idempotent:
                        raise
            wire = await self._dialed(request, deadline)
            reading = self._reading(wire, request, deadline)
            response = await self._exchange(origin, reading, request, head)
            # After the response: a TLS 1.3 server sends its session tickets after the handshake.
            self._dialer.remember(request.target, request.partition, wire)
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
        head = encode_request(request, upload.size_bytes if upload else None)
        deadline = trio.current_time() + request.deadline_s
        with until(deadline):
            origin = await self._slots.acquire((request.partition, request.target.origin))
        try:
            reading = await self._asked(origin, request, head, deadline, upload)
            try:
                yield StreamingResponse(reading)
            finally:
                reading.stop_timer()
                reading.reply.close()
                self._keep_or_close(origin, reading, has_body=bool(request.body or upload))
        finally:
            self._slots.release(origin)

    async def _asked(
        self,
        origin: OriginPool,
        request: Request,
        head: bytes,
        deadline: float,
        upload: Upload | None,
    ) -> Exchange:
        """Returns an exchange whose response head has arrived, over a kept or a new connection."""
        kept = self._slots.pop_idle(origin, trio.current_time())
        if kept is not None:
            reading = self._reading(kept, request, deadline)
            try:
                return await _answered(reading, head, upload)
            except ConnectionLost:
                if reading.reply.has_started or upload is not None or not request.is_idempotent:
                    raise
        wire = await self._dialed(request, deadline)
        return await _answered(self._reading(wire, request, deadline), head, upload)

    async def _dialed(self, request: Request, deadline: float) -> TcpStream | TlsStream:
        with until(deadline):
            # Evict before the connect, so that the new socket stays within `connections_max`.
            self._slots.evict_idle()
            return await self._dialer.dial(
                request.target, request.partition, request.connect_timeout_s
            )

    def _reading(self, wire: TcpStream | TlsStream, request: Request, deadline: float) -> Exchange:
        reply = ResponseParser(has_body=request.method != "HEAD")
        patience_s = request.read_timeout_s
        if patience_s is None:
            patience_s = self._limits.read_timeout_s
        return Exchange(wire, reply, self._watch, deadline=deadline, patience_s=patience_s)

    async def _exchange(
        self, origin: OriginPool, reading: Exchange, request: Request, head: bytes
    ) -> Response:
        wire, reply = reading.wire, reading.reply
        try:
            await reading.send(head)
            if request.wants_body(reply.status):
                response = await self._whole(reading, request)
            else:
                reading.require_rate(self._limits.body_rate_min)
                response = await _shortened(reading)
        except BaseException:
            # Cancellation included: a connection in the middle of a response is never reused.
            wire.close()
            raise
        finally:
            reading.stop_timer()
            reply.close()
        self._keep_or_close(origin, reading, has_body=bool(request.body))
        return response

    def _keep_or_close(self, origin: OriginPool, reading: Exchange, *, has_body: bool) -> None:
        # The peer may still send bytes that the next request would read as its response.
        may_owe_bytes = (has_body or reading.reply.has_oddities) and not self._limits.trusts_peers
        if reading.reply.is_reusable and not reading.is_early and not may_owe_bytes:
            self._slots.return_connection(origin, reading.wire)
            return
        reading.wire.close()
        if reading.reply.has_surplus:
            self._slots.distrust(origin)

    async def _whole(self, reading: Exchange, request: Request) -> Response:
        reply = reading.reply
        if reply.is_done and not reply.encodings:
            # Most pages arrive in one read together with their head. They need no WholeBody.
            page = reply.take()
            if len(page) <= request.body_bytes_max:
                return Response(reply.status, reply.headers, page)
            raise too_large(request.body_bytes_max)
        body = WholeBody(reply.encodings, request.body_bytes_max)
        # Refuse an announced length before the first read: the transfer would be wasted.
        body.expect(reply.content_length)
        reading.require_rate(self._limits.body_rate_min)
        permit = LargeBody(self._large, request.partition, reading)
        try:
            while True:
                data = reply.take()
                if data and body.add(data):
                    await self._decode(body, reading, request.partition, permit)
                if reply.is_done:
                    break
                # The permit is taken when the body *is* large, not when the site announces it:
                # an announcement costs the site nothing and would block other callers.
                if max(body.size, body.encoded_bytes) > self._limits.large_body_bytes:
                    await permit.acquire()
                await reading.read_more()
        finally:
            permit.close()
        return Response(reply.status, reply.headers, body.finish())

    async def _decode(
        self, body: WholeBody, reading: Exchange, partition: str, permit: LargeBody
    ) -> None:
        """Decodes the added bytes: a small page in the event loop, a larger one in the executor."""
        is_small = body.encoded_bytes <= INLINE_ENCODED_BYTES_MAX
        if is_small and not body.decode_step(INLINE_CPU_S_MAX):
            return
        # Decoding is not a wait for the peer: the timer stops, and `excuse` below subtracts the
        # time from the peer's minimum rate.
        reading.stop_timer()
        begun_at = trio.current_time()
        is_more = True
        while is_more:
            if body.size > self._limits.large_body_bytes:
                await permit.acquire()
            with until(reading.deadline):
                is_more = await self._decoding.run(partition, body.decode_step)
        reading.excuse(trio.current_time() - begun_at)


async def _answered(reading: Exchange, head: bytes, upload: Upload | None) -> Exchange:
    try:
        await reading.send(head, upload)
    except BaseException:
        reading.stop_timer()
        reading.reply.close()
        reading.wire.close()
        raise
    reading.stop_timer()
    return reading


async def _shortened(reading: Exchange) -> Response:
    """Reads at most the first 64 KiB of a body that the caller does not want.

    If the body ends within this size, the connection can be reused.
    """
    reply = reading.reply
    encoded = reply.take()
    try:
        while not reply.is_done and len(encoded) <= EXCERPT_BYTES:
            await reading.read_more()
            encoded += reply.take()
    except (ConnectionLost, BadResponse):
        pass  # The status is known. The excerpt is optional, so its loss is no error.
    body = excerpt(reply.encodings, encoded)
    return Response(reply.status, reply.headers, body, is_whole=reply.is_done)
