"""Who may have a connection, and which idle ones are kept: all in constant time.

A fetch holds a slot of its origin and one of the pool, taken in this order, so that a crowded
origin never holds up the others. Idle connections are counted too: when the pool is full of them,
the one that idled longest makes room.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import trio

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


class _Lane:
    """One origin: its slots, and its idle connections, the freshest last."""

    __slots__ = ("idle", "slots", "users")

    def __init__(self, slots: int) -> None:
        self.slots = trio.Semaphore(slots)
        self.idle: deque[Wire] = deque()
        self.users = 0


class Slots:
    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._total = trio.Semaphore(limits.connections_max)
        self._lanes: dict[Origin, _Lane] = {}
        self._idle: OrderedDict[Wire, Origin] = OrderedDict()
        self._leased = 0

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def origin_count(self) -> int:
        return len(self._lanes)

    def acquire_nowait(self, origin: Origin) -> bool:
        """A slot if one is free at once, both of the origin and of the pool."""
        lane = self._lane(origin)
        try:
            lane.slots.acquire_nowait()
        except trio.WouldBlock:
            return False
        try:
            self._total.acquire_nowait()
        except trio.WouldBlock:
            lane.slots.release()
            self._forget(origin, lane)
            return False
        lane.users += 1
        self._leased += 1
        return True

    async def acquire(self, origin: Origin) -> None:
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
            self._leave(origin, lane)
            raise
        self._leased += 1

    def release(self, origin: Origin) -> None:
        lane = self._lanes[origin]
        self._leased -= 1
        self._total.release()
        lane.slots.release()
        self._leave(origin, lane)

    def take_idle(self, origin: Origin) -> Wire | None:
        """The freshest idle connection that is still open, if any; others are closed."""
        lane = self._lanes[origin]
        now = trio.current_time()
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

    def keep(self, origin: Origin, wire: Wire) -> None:
        now = trio.current_time()
        wire.idle_until = now + self._limits.keep_alive_s
        self._lanes[origin].idle.append(wire)
        self._idle[wire] = origin
        while self._idle and next(iter(self._idle)).idle_until <= now:
            self._drop_oldest()

    def close_idle(self) -> None:
        while self._idle:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        wire, origin = self._idle.popitem(last=False)
        lane = self._lanes[origin]
        # The oldest of all is the oldest of its lane, so it stands first.
        lane.idle.popleft()
        wire.close()
        self._forget(origin, lane)

    def _lane(self, origin: Origin) -> _Lane:
        lane = self._lanes.get(origin)
        if lane is None:
            lane = self._lanes[origin] = _Lane(self._limits.connections_per_origin_max)
        return lane

    def _leave(self, origin: Origin, lane: _Lane) -> None:
        lane.users -= 1
        self._forget(origin, lane)

    def _forget(self, origin: Origin, lane: _Lane) -> None:
        if not lane.users and not lane.idle:
            del self._lanes[origin]
