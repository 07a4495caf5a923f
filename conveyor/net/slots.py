"""Who may have a connection, and which idle ones are kept: all in constant time.

A fetch holds a slot of its origin and one of the pool, taken in this order, so that a crowded
origin never holds up the others. Idle connections are counted too: when the pool is full of them,
the one that idled longest makes room.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import trio

from conveyor.net.tls import TlsWire
from conveyor.net.wire import Wire

Origin = tuple[str, str, int]


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    connections_max: int = 1024
    connections_per_origin_max: int = 256
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    large_bodies_max: int = 8
    large_body_bytes: int = 1024 * 1024


class Lane:
    """One origin: its slots, and its idle connections, the freshest last."""

    __slots__ = ("idle", "origin", "slots", "users")

    def __init__(self, origin: Origin, slots: int) -> None:
        self.origin = origin
        self.slots = trio.Semaphore(slots)
        self.idle: deque[Wire | TlsWire] = deque()
        self.users = 0


class Slots:
    """Whoever acquires a lane releases it."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._total = trio.Semaphore(limits.connections_max)
        self._lanes: dict[Origin, Lane] = {}
        self._idle: OrderedDict[Wire | TlsWire, Lane] = OrderedDict()
        self._leased = 0

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def origin_count(self) -> int:
        return len(self._lanes)

    def acquire_nowait(self, origin: Origin) -> Lane | None:
        """A slot if one is free at once, both of the origin and of the pool."""
        lane = self._lane(origin)
        try:
            lane.slots.acquire_nowait()
        except trio.WouldBlock:
            return None
        try:
            self._total.acquire_nowait()
        except trio.WouldBlock:
            lane.slots.release()
            self._forget(lane)
            return None
        lane.users += 1
        self._leased += 1
        return lane

    async def acquire(self, origin: Origin) -> Lane:
        lane = self._lane(origin)
        lane.users += 1
        try:
            await lane.slots.acquire()
            try:
                await self._total.acquire()
            except BaseException:
                lane.slots.release()
                raise
        except BaseException:
            self._leave(lane)
            raise
        self._leased += 1
        return lane

    def release(self, lane: Lane) -> None:
        self._leased -= 1
        self._total.release()
        lane.slots.release()
        self._leave(lane)

    def take_idle(self, lane: Lane, now: float) -> Wire | TlsWire | None:
        """The freshest idle connection that is still open, if any; others are closed."""
        while lane.idle:
            wire = lane.idle.pop()
            del self._idle[wire]
            if wire.idle_until > now and wire.is_quiet():
                return wire
            wire.close()
        return None

    def make_room(self) -> None:
        """Before a new connection: open ones, leased or idle, stay within the pool's limit."""
        while self._idle and self._leased + len(self._idle) > self._limits.connections_max:
            self._drop_oldest()

    def keep(self, lane: Lane, wire: Wire | TlsWire) -> None:
        now = trio.current_time()
        wire.idle_until = now + self._limits.keep_alive_s
        lane.idle.append(wire)
        self._idle[wire] = lane
        while self._idle and next(iter(self._idle)).idle_until <= now:
            self._drop_oldest()

    def close_idle(self) -> None:
        while self._idle:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        wire, lane = self._idle.popitem(last=False)
        # The oldest of all is the oldest of its lane, so it stands first.
        lane.idle.popleft()
        wire.close()
        self._forget(lane)

    def _lane(self, origin: Origin) -> Lane:
        lane = self._lanes.get(origin)
        if lane is None:
            lane = Lane(origin, self._limits.connections_per_origin_max)
            self._lanes[origin] = lane
        return lane

    def _leave(self, lane: Lane) -> None:
        lane.users -= 1
        self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        if not lane.users and not lane.idle:
            del self._lanes[lane.origin]
