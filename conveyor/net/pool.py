"""HttpPool: one request in, one response out, over connections that are kept and reused.

Laws:
- A socket is opened only to an address that the policy allowed in this very resolution.
- A fetch ends within its deadline, and a cancelled one closes its connection at once.
- A connection is reused only if its last response ended exactly where the bytes did.
- Only a GET or HEAD is sent twice, and only if the kept connection died without a byte.
- No environment variable sets a proxy.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.urls import Target
from conveyor.net.body import EXCERPT_BYTES, WholeBody, excerpt
from conveyor.net.dialer import Connect, Dialer
from conveyor.net.errors import TOO_LATE, BadResponse, ConnectionLost, TimedOut
from conveyor.net.message import Request, Response, Upload, encode_request
from conveyor.net.reading import Reading
from conveyor.net.reply import Reply
from conveyor.net.resolver import Lookup, Resolver
from conveyor.net.slots import Lane, PoolLimits, Slots
from conveyor.net.streaming import Incoming
from conveyor.net.tls import TlsWire
from conveyor.net.watch import Watch
from conveyor.net.wire import Wire, connect


class HttpPool:
    """Close it with `close()` once no fetch is running; it holds sockets and nothing else."""

    def __init__(
        self,
        policy: TargetPolicy,
        limits: PoolLimits | None = None,
        *,
        lookup: Lookup | None = None,
        tls: ssl.SSLContext | None = None,
        connect: Connect = connect,
    ) -> None:
        limits = limits or PoolLimits()
        self.policy = policy
        self._limits = limits
        self._slots = Slots(limits)
        self._watch = Watch()
        self._large = trio.Semaphore(limits.large_bodies_max)
        self._resolver = Resolver(policy, lookup)
        self._dialer = Dialer(self._resolver, tls, limits.connect_timeout_s, connect)

    @property
    def idle_count(self) -> int:
        return self._slots.idle_count

    @property
    def origin_count(self) -> int:
        return self._slots.origin_count

    def close(self) -> None:
        self._slots.close_idle()

    async def resolve(self, target: Target) -> tuple[str, ...]:
        """Where a request would go. Raises ForbiddenTarget and NameNotResolved."""
        return await self._resolver.resolve(target)

    async def fetch(self, request: Request) -> Response:
        """The response, whatever its status. Raises the family of FetchFailed."""
        head = encode_request(request)
        now = trio.current_time()
        deadline = now + request.deadline_s
        lane = self._slots.acquire_nowait(request.target.origin)
        if lane is None:
            with _until(deadline):
                lane = await self._slots.acquire(request.target.origin)
            now = trio.current_time()
        try:
            kept = self._slots.take_idle(lane, now)
            if kept is not None:
                reading = self._reading(kept, request, deadline)
                try:
                    return await self._exchange(lane, reading, request, head)
                except ConnectionLost:
                    # The server hung up between two requests, as it may.
                    if reading.reply.has_started or not request.is_idempotent:
                        raise
            wire = await self._dialed(request, deadline)
            reading = self._reading(wire, request, deadline)
            response = await self._exchange(lane, reading, request, head)
            self._dialer.remember(request.target, wire)
            return response
        finally:
            self._slots.release(lane)

    @asynccontextmanager
    async def open(
        self, request: Request, upload: Upload | None = None
    ) -> AsyncGenerator[Incoming, None]:
        """The response as it arrives; whoever leaves before its end closes the connection.

        A body that comes in pieces is not sent twice. Raises the family of FetchFailed.
        """
        head = encode_request(request, upload.size_bytes if upload else None)
        deadline = trio.current_time() + request.deadline_s
        with _until(deadline):
            lane = await self._slots.acquire(request.target.origin)
        try:
            reading = await self._asked(lane, request, head, deadline, upload)
            try:
                yield Incoming(reading)
            finally:
                reading.relax()
                reading.reply.close()
                if reading.reply.is_reusable:
                    self._slots.keep(lane, reading.wire)
                else:
                    reading.wire.close()
        finally:
            self._slots.release(lane)

    async def _asked(
        self, lane: Lane, request: Request, head: bytes, deadline: float, upload: Upload | None
    ) -> Reading:
        """An answer whose head is there, over a kept connection or over a new one."""
        kept = self._slots.take_idle(lane, trio.current_time())
        if kept is not None:
            reading = self._reading(kept, request, deadline)
            try:
                return await _answered(reading, head, upload)
            except ConnectionLost:
                if reading.reply.has_started or upload is not None or not request.is_idempotent:
                    raise
        wire = await self._dialed(request, deadline)
        return await _answered(self._reading(wire, request, deadline), head, upload)

    async def _dialed(self, request: Request, deadline: float) -> Wire | TlsWire:
        with _until(deadline):
            self._slots.make_room()
            return await self._dialer.dial(request.target, request.connect_timeout_s)

    def _reading(self, wire: Wire | TlsWire, request: Request, deadline: float) -> Reading:
        reply = Reply(has_body=request.method != "HEAD")
        patience_s = request.read_timeout_s
        if patience_s is None:
            patience_s = self._limits.read_timeout_s
        return Reading(wire, reply, self._watch, deadline=deadline, patience_s=patience_s)

    async def _exchange(
        self, lane: Lane, reading: Reading, request: Request, head: bytes
    ) -> Response:
        wire, reply = reading.wire, reading.reply
        try:
            await reading.ask(head)
            if request.wants_body(reply.status):
                response = await self._whole(reading, request)
            else:
                response = await _shortened(reading)
        except BaseException:
            wire.close()
            raise
        finally:
            reading.relax()
            reply.close()
        if reply.is_reusable:
            self._slots.keep(lane, wire)
        else:
            wire.close()
        return response

    async def _whole(self, reading: Reading, request: Request) -> Response:
        reply = reading.reply
        body = WholeBody(reply.encodings, request.body_bytes_max)
        body.expect(reply.content_length)
        has_permit = False
        try:
            if (reply.content_length or 0) > self._limits.large_body_bytes:
                has_permit = await self._permit(reading)
            while True:
                data = reply.take()
                for _ in body.add(data) if data else ():
                    if body.size > self._limits.large_body_bytes and not has_permit:
                        has_permit = await self._permit(reading)
                if reply.is_done:
                    break
                await reading.more()
            return Response(reply.status, reply.headers, body.finish())
        finally:
            if has_permit:
                self._large.release()

    async def _permit(self, reading: Reading) -> bool:
        """Few large bodies are in memory at a time; waiting for a turn is not the site's delay."""
        reading.relax()
        with _until(reading.deadline):
            await self._large.acquire()
        return True


@contextmanager
def _until(deadline: float) -> Iterator[None]:
    """For what is no wait for a connected peer, and therefore not watched."""
    with trio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise TimedOut(TOO_LATE)


async def _answered(reading: Reading, head: bytes, upload: Upload | None) -> Reading:
    try:
        await reading.ask(head, upload)
    except BaseException:
        reading.relax()
        reading.reply.close()
        reading.wire.close()
        raise
    reading.relax()
    return reading


async def _shortened(reading: Reading) -> Response:
    """Enough of an answer to look at. One that ends soon leaves its connection usable."""
    reply = reading.reply
    encoded = reply.take()
    try:
        while not reply.is_done and len(encoded) <= EXCERPT_BYTES:
            await reading.more()
            encoded += reply.take()
    except (ConnectionLost, BadResponse):
        pass  # The status is known, and nobody needs the rest.
    body = excerpt(reply.encodings, encoded)
    return Response(reply.status, reply.headers, body, is_whole=reply.is_done)
