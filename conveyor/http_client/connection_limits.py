"""Who may have a connection, and which idle ones are kept: all in constant time.

A fetch holds a slot of its lane, which is one caller at one origin, and one of the pool, taken in
this order, so that a crowded origin never holds up the others. Idle connections are counted too:
when the pool is full of them, the one that idled longest makes room. A connection is never handed
to another caller: what a site still sends into it was meant for the first.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import trio

from conveyor.http_client.stream import TcpStream, TlsStream

Origin = tuple[str, str, int]
OriginKey = tuple[str, Origin]

# A peer that sent more than it was asked for is not trusted with a second request for so long: the
# next surplus may come when it is taken for a response.
DISTRUST_S = 600.0
DISTRUSTED_MAX = 1024

# Idle connections that end close together are closed in one go: late by so much of their time.
_REAP_LATENESS_MAX = 1 / 15


class Rate(msgspec.Struct, frozen=True):
    """The least that a peer must send: so many bytes a second on average, after a grace."""

    grace_s: float
    bytes_per_s: float

    def seconds_for(self, size_bytes: int) -> float:
        """How long the peer may be waited for until it has sent so many bytes."""
        return max(self.grace_s, size_bytes / self.bytes_per_s)


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`connections_per_origin_max` holds for each caller. Only where `trusts_peers`, that is with
    services of the operator's own, does a connection outlive a request with a body: elsewhere the
    peer may have taken the body for its next request, and its answer would be the next one's.

    `body_rate_min` is what any body must come at: a page that is made while it is sent may pause
    for half a minute, and a modem makes 4 KiB/s. A body larger than `large_body_bytes` holds one of
    `large_bodies_max` permits while it arrives: of 25 MiB, none that comes at less than 146 KiB/s
    meets the deadline of a fetch, so `large_body_rate_min` is a tenth of that. While another
    caller waits for a permit, `crowded_body_rate_min` holds.
    """

    connections_max: int = 1024
    connections_per_origin_max: int = 256
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    large_bodies_max: int = 8
    large_bodies_per_caller_max: int = 2
    large_body_bytes: int = 1024 * 1024
    body_rate_min: Rate = Rate(30.0, 1024)
    large_body_rate_min: Rate = Rate(15.0, 16 * 1024)
    crowded_body_rate_min: Rate = Rate(2.0, 256 * 1024)
    trusts_peers: bool = False


class OriginPool:
    """One caller at one origin: its slots, and its idle connections, the freshest last."""

    __slots__ = ("idle", "key", "slots", "users")

    def __init__(self, key: OriginKey, slots: int) -> None:
        self.key = key
        self.slots = trio.Semaphore(slots)
        self.idle: deque[TcpStream | TlsStream] = deque()
        self.users = 0


class ConnectionLimits:
    """Whoever acquires a lane releases it."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._total = trio.Semaphore(limits.connections_max)
        self._origins: dict[OriginKey, OriginPool] = {}
        self._idle: OrderedDict[TcpStream | TlsStream, OriginPool] = OrderedDict()
        self._leased = 0
        self._distrusted: OrderedDict[OriginKey, float] = OrderedDict()
        self._is_reaping = False
        self._reap_grain_s = limits.keep_alive_s * _REAP_LATENESS_MAX

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def origin_count(self) -> int:
        return len(self._origins)

    def acquire_nowait(self, key: OriginKey) -> OriginPool | None:
        """A slot if one is free at once, both of the lane and of the pool."""
        origin = self._origin(key)
        try:
            origin.slots.acquire_nowait()
        except trio.WouldBlock:
            return None
        try:
            self._total.acquire_nowait()
        except trio.WouldBlock:
            origin.slots.release()
            self._forget(origin)
            return None
        origin.users += 1
        self._leased += 1
        return origin

    async def acquire(self, key: OriginKey) -> OriginPool:
        origin = self._origin(key)
        origin.users += 1
        try:
            await origin.slots.acquire()
            try:
                await self._total.acquire()
            except BaseException:
                origin.slots.release()
                raise
        except BaseException:
            self._leave(origin)
            raise
        self._leased += 1
        return origin

    def release(self, origin: OriginPool) -> None:
        self._leased -= 1
        self._total.release()
        origin.slots.release()
        self._leave(origin)

    def pop_idle(self, origin: OriginPool, now: float) -> TcpStream | TlsStream | None:
        """The freshest idle connection that is still open, if any; others are closed."""
        while origin.idle:
            wire = origin.idle.pop()
            del self._idle[wire]
            if wire.idle_until > now and wire.is_quiet():
                return wire
            self._close_idle_wire(origin, wire)
        return None

    def distrust(self, origin: OriginPool) -> None:
        """Keeps no connection of this lane from now on, nor uses those that were kept."""
        self._distrusted[origin.key] = trio.current_time() + DISTRUST_S
        if len(self._distrusted) > DISTRUSTED_MAX:
            self._distrusted.popitem(last=False)
        while origin.idle:
            wire = origin.idle.pop()
            del self._idle[wire]
            wire.close()

    def _close_idle_wire(self, origin: OriginPool, wire: TcpStream | TlsStream) -> None:
        has_unread = wire.has_unread()
        wire.close()
        if has_unread:
            self.distrust(origin)

    def evict_idle(self) -> None:
        """Before a new connection: open ones, leased or idle, stay within the pool's limit."""
        while self._idle and self._leased + len(self._idle) > self._limits.connections_max:
            self._drop_oldest()

    def return_connection(self, origin: OriginPool, wire: TcpStream | TlsStream) -> None:
        now = trio.current_time()
        if self._distrusted and self._distrusted.get(origin.key, now) > now:
            wire.close()
            return
        wire.idle_until = now + self._limits.keep_alive_s
        origin.idle.append(wire)
        self._idle[wire] = origin
        self._drop_expired(now)
        if not self._is_reaping:
            self._is_reaping = True
            trio.lowlevel.spawn_system_task(self._reap)

    def close_idle(self) -> None:
        while self._idle:
            self._drop_oldest()

    async def _reap(self) -> None:
        """Closes idle connections at their time even if no further request is made."""
        try:
            while self._idle:
                now = trio.current_time()
                until = next(iter(self._idle)).idle_until
                await trio.sleep_until(max(until, now + self._reap_grain_s))
                self._drop_expired(trio.current_time())
        finally:
            self._is_reaping = False

    def _drop_expired(self, now: float) -> None:
        while self._idle and next(iter(self._idle)).idle_until <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        wire, origin = self._idle.popitem(last=False)
        # The oldest of all is the oldest of its lane, so it stands first.
        origin.idle.popleft()
        self._close_idle_wire(origin, wire)
        self._forget(origin)

    def _origin(self, key: OriginKey) -> OriginPool:
        origin = self._origins.get(key)
        if origin is None:
            origin = OriginPool(key, self._limits.connections_per_origin_max)
            self._origins[key] = origin
        return origin

    def _leave(self, origin: OriginPool) -> None:
        origin.users -= 1
        self._forget(origin)

    def _forget(self, origin: OriginPool) -> None:
        if not origin.users and not origin.idle:
            del self._origins[origin.key]
