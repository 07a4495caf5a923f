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

import trio

from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.urls import Target
from conveyor.net.body import EXCERPT_BYTES, WholeBody, excerpt
from conveyor.net.dialer import Connect, Dialer, default_tls
from conveyor.net.errors import BadResponse, ConnectionLost, TimedOut
from conveyor.net.message import Request, Response, encode_request
from conveyor.net.reading import Pace, Reading
from conveyor.net.reply import Reply
from conveyor.net.resolver import Lookup, Resolver
from conveyor.net.slots import PoolLimits, Slots
from conveyor.net.wire import connect


class HttpPool:
    """Close it with `close()` once no fetch is running; it keeps no task of its own."""

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
        self._large = trio.Semaphore(limits.large_bodies_max)
        self._resolver = Resolver(policy, lookup)
        self._dialer = Dialer(
            self._resolver, tls or default_tls(), limits.connect_timeout_s, connect
        )

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
        origin = request.target.origin
        pace = Pace(request.deadline_s, self._limits.read_timeout_s)
        with pace.scope:
            if not self._slots.acquire_nowait(origin):
                pace.relax()
                await self._slots.acquire(origin)
            try:
                return await self._fetch(request, head, pace)
            finally:
                self._slots.release(origin)
        raise TimedOut("no complete answer before the deadline")

    async def _fetch(self, request: Request, head: bytes, pace: Pace) -> Response:
        kept = self._slots.take_idle(request.target.origin)
        if kept is not None:
            reading = Reading(kept, Reply(has_body=request.method != "HEAD"), pace)
            try:
                return await self._exchange(reading, request, head)
            except ConnectionLost:
                # The server hung up between two requests, as it may.
                if reading.reply.has_started or not request.is_idempotent:
                    raise
        pace.relax()
        self._slots.make_room()
        wire = await self._dialer.dial(request.target)
        reading = Reading(wire, Reply(has_body=request.method != "HEAD"), pace)
        return await self._exchange(reading, request, head)

    async def _exchange(self, reading: Reading, request: Request, head: bytes) -> Response:
        wire, reply = reading.wire, reading.reply
        try:
            await wire.send(head)
            await reading.head()
            if request.wants_body(reply.status):
                response = await self._whole(reading, request)
            else:
                response = await _shortened(reading)
        except BaseException:
            wire.close()
            raise
        finally:
            reply.close()
        if reply.is_reusable:
            self._dialer.remember(request.target, wire)
            self._slots.keep(request.target.origin, wire)
        else:
            wire.close()
        return response

    async def _whole(self, reading: Reading, request: Request) -> Response:
        reply = reading.reply
        body = WholeBody(_encodings(reply), request.body_bytes_max)
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
        reading.pace.relax()
        await self._large.acquire()
        return True


def _encodings(reply: Reply) -> list[bytes]:
    return [value for name, value in reply.headers if name == b"content-encoding"]


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
    body = excerpt(_encodings(reply), encoded)
    return Response(reply.status, reply.headers, body, is_whole=reply.is_done)
