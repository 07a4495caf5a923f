"""Limits how many connections are open, and keeps the idle ones; every operation takes constant
time.

A fetch holds one slot of its `OriginPool` (one caller at one origin) and one slot of the pool. It
takes them in this order, so that fetches that wait for a crowded origin hold no slot of the pool.
Idle connections count as open: when the pool is full, the connection that was idle longest is
closed. A connection is never given to another caller, because bytes that the site still sends
into it belong to the first caller.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import trio

from conveyor.domain import limits
from conveyor.http_client.stream import TcpStream, TlsStream

Origin = tuple[str, str, int]
OriginKey = tuple[str, Origin]

# After a peer sent more bytes than one response, its connections are not reused for this time: the
# next surplus could arrive when the pool expects a response. A smaller value gives an attacker more
# attempts; a larger one costs a repaired site more handshakes.
DISTRUST_S = 600.0
# Bounds the memory of the list. When it is full, the oldest entry is dropped first.
DISTRUSTED_MAX = 1024

# Idle connections are closed up to this fraction of `keep_alive_s` late, so that the reaper closes
# connections that expire close together in one step. A smaller value wakes the reaper more often.
_REAP_LATENESS_MAX = 1 / 15


class Rate(msgspec.Struct, frozen=True):
    """The minimum rate of a peer: `bytes_per_s` on average, after `grace_s` seconds."""

    grace_s: float
    bytes_per_s: float

    def seconds_for(self, size_bytes: int) -> float:
        """The time after which a peer that has sent only `size_bytes` is too slow."""
        return max(self.grace_s, size_bytes / self.bytes_per_s)


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one pool.

    `connections_per_origin_max` applies to each caller. With `trusts_peers`, which is meant for the
    operator's own services, a connection is reused after a request with a body. Another peer may
    have read the body as a second request, and its response to that would be taken for the response
    to the next request.

    A body of up to `unreserved_body_bytes` needs no reservation of memory. A larger one shares
    `medium_bodies_bytes_max` with others, and one larger than `large_body_bytes` shares
    `large_bodies_bytes_max` (large_bodies.py). A caller has at most half of each, unless
    `has_one_caller`.

    `body_rate_min` applies to every body: a page that is generated while it is sent may pause for
    half a minute, and a modem receives 4 KiB/s. A body of 25 MiB that arrives at less than
    146 KiB/s misses the deadline of a fetch, so `large_body_rate_min` is about a tenth of that
    rate. It applies to bodies that hold memory of large bodies, and while another caller waits for
    such memory, `crowded_body_rate_min` does.
    """

    connections_max: int = 1024
    connections_per_origin_max: int = 256
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    unreserved_body_bytes: int = 64 * 1024
    medium_bodies_bytes_max: int = 256 * 1024 * 1024
    large_body_bytes: int = 1024 * 1024
    large_bodies_bytes_max: int = 8 * limits.BODY_BYTES_MAX
    has_one_caller: bool = False
    body_rate_min: Rate = Rate(30.0, 1024)
    large_body_rate_min: Rate = Rate(15.0, 16 * 1024)
    crowded_body_rate_min: Rate = Rate(2.0, 256 * 1024)
    trusts_peers: bool = False


class OriginPool:
    """The slots of one caller at one origin, and its idle connections, most recently used last."""

    __slots__ = ("idle", "key", "slots", "users")

    def __init__(self, key: OriginKey, slots: int) -> None:
        self.key = key
        self.slots = trio.Semaphore(slots)
        self.idle: deque[TcpStream | TlsStream] = deque()
        self.users = 0


class ConnectionLimits:
    """Grants slots. The caller of `acquire` or of a successful `acquire_nowait` calls `release`
    exactly once.
    """

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
        """Takes a slot of the origin and one of the pool if both are free; else returns None."""
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
        # Count this fetch before the first await: `_forget` keeps an origin that has users.
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
        """Returns the most recently used idle connection that is open and silent, or None.

        Connections that are expired, closed by the peer, or have unread bytes are closed here.
        """
        while origin.idle:
            stream = origin.idle.pop()
            del self._idle[stream]
            if stream.idle_until > now and stream.is_quiet():
                return stream
            self._close_idle_stream(origin, stream)
        return None

    def distrust(self, origin: OriginPool) -> None:
        """Closes the idle connections of this origin and keeps no new ones for DISTRUST_S."""
        self._distrusted[origin.key] = trio.current_time() + DISTRUST_S
        if len(self._distrusted) > DISTRUSTED_MAX:
            self._distrusted.popitem(last=False)
        while origin.idle:
            stream = origin.idle.pop()
            del self._idle[stream]
            stream.close()

    def _close_idle_stream(self, origin: OriginPool, stream: TcpStream | TlsStream) -> None:
        has_unread = stream.has_unread()
        stream.close()
        if has_unread:
            self.distrust(origin)

    def evict_idle(self) -> None:
        """Closes idle connections until leased and idle ones together are within the limit.

        The pool calls it before it opens a connection.
        """
        while self._idle and self._leased + len(self._idle) > self._limits.connections_max:
            self._drop_oldest()

    def return_connection(self, origin: OriginPool, stream: TcpStream | TlsStream) -> None:
        now = trio.current_time()
        if self._distrusted and self._distrusted.get(origin.key, now) > now:
            stream.close()
            return
        stream.idle_until = now + self._limits.keep_alive_s
        origin.idle.append(stream)
        self._idle[stream] = origin
        self._drop_expired(now)
        if not self._is_reaping:
            self._is_reaping = True
            trio.lowlevel.spawn_system_task(self._reap)

    def close_idle(self) -> None:
        while self._idle:
            self._drop_oldest()

    async def _reap(self) -> None:
        """Closes expired connections even if no further request is made.

        It is a system task that ends when no connection is idle, so that a pool without
        connections has no task.
        """
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
        stream, origin = self._idle.popitem(last=False)
        # The oldest connection of the pool is also the oldest of its origin, so it is the first.
        origin.idle.popleft()
        self._close_idle_stream(origin, stream)
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
