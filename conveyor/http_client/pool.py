"""HttpPool: one request in, one response out, over connections that are kept and reused.

Laws:
- A socket is opened only to an address that the policy allowed in this very resolution.
- A fetch ends within its deadline, and a cancelled one closes its connection at once.
- A connection serves one caller: no other caller's request is ever sent on it.
- A connection is reused only if its last response ended exactly where the bytes did, and not
  after a request with a body, a HEAD or an interim response, unless the peers are trusted. A
  peer that sent more than a response gets a connection for each request from then on.
- Only a GET or HEAD is sent twice, and only if the kept connection died without a byte.
- No environment variable sets a proxy.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from conveyor.domain.submit.ssrf import TargetPolicy
from conveyor.domain.submit.url import Target
from conveyor.http_client.connection_limits import ConnectionLimits, OriginPool, PoolLimits
from conveyor.http_client.connector import Connect, Dialer
from conveyor.http_client.errors import BadResponse, ConnectionLost
from conveyor.http_client.exchange import DeadlineTimer, Exchange, StreamingResponse, until
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
from conveyor.http_client.response_parser import ResponseParser
from conveyor.http_client.stream import TcpStream, TlsStream, connect
from conveyor.ports.executor import Executor


class HttpPool:
    """Close it with `close()` once no fetch is running; it holds sockets and nothing else. Large
    bodies are decoded `aside`, where there is one.
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
        """How many pairs of a caller and an origin have connections or wait for one."""
        return self._slots.origin_count

    def close(self) -> None:
        self._slots.close_idle()

    async def resolve(self, target: Target, partition: str = "") -> tuple[str, ...]:
        """Where a request would go. Raises ForbiddenTarget and NameNotResolved."""
        return await self._resolver.resolve(target, partition)

    async def fetch(self, request: Request) -> Response:
        """The response, whatever its status. Raises the family of FetchFailed."""
        head = encode_request(request)
        now = trio.current_time()
        deadline = now + request.deadline_s
        key = (request.partition, request.target.origin)
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
                    # The server hung up between two requests, as it may.
                    if reading.reply.has_started or not request.is_idempotent:
                        raise
            wire = await self._dialed(request, deadline)
            reading = self._reading(wire, request, deadline)
            response = await self._exchange(origin, reading, request, head)
            self._dialer.remember(request.target, request.partition, wire)
            return response
        finally:
            self._slots.release(origin)

    @asynccontextmanager
    async def open(
        self, request: Request, upload: Upload | None = None
    ) -> AsyncGenerator[StreamingResponse, None]:
        """The response as it arrives; whoever leaves before its end closes the connection.

        A body that comes in pieces is not sent twice. Raises the family of FetchFailed.
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
        """An answer whose head is there, over a kept connection or over a new one."""
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
            wire.close()
            raise
        finally:
            reading.stop_timer()
            reply.close()
        self._keep_or_close(origin, reading, has_body=bool(request.body))
        return response

    def _keep_or_close(self, origin: OriginPool, reading: Exchange, *, has_body: bool) -> None:
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
            # Most pages come in one read with their head.
            page = reply.take()
            if len(page) <= request.body_bytes_max:
                return Response(reply.status, reply.headers, page)
            raise too_large(request.body_bytes_max)
        body = WholeBody(reply.encodings, request.body_bytes_max)
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
                if max(body.size, body.encoded_bytes) > self._limits.large_body_bytes:
                    await permit.acquire()
                await reading.read_more()
        finally:
            permit.close()
        return Response(reply.status, reply.headers, body.finish())

    async def _decode(
        self, body: WholeBody, reading: Exchange, partition: str, permit: LargeBody
    ) -> None:
        """Decode what was added: a small page here and now, more of it aside."""
        is_small = body.encoded_bytes <= INLINE_ENCODED_BYTES_MAX
        if is_small and not body.decode_step(INLINE_CPU_S_MAX):
            return
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
    """Enough of an answer to look at. One that ends soon leaves its connection usable."""
    reply = reading.reply
    encoded = reply.take()
    try:
        while not reply.is_done and len(encoded) <= EXCERPT_BYTES:
            await reading.read_more()
            encoded += reply.take()
    except (ConnectionLost, BadResponse):
        pass  # The status is known, and nobody needs the rest.
    body = excerpt(reply.encodings, encoded)
    return Response(reply.status, reply.headers, body, is_whole=reply.is_done)
