"""Shares the memory for bodies and the threads that decode them among the callers.

All bodies together are bounded, and no caller can hold all of the memory. A body of up to
`unreserved_body_bytes` needs no reservation: the number of fetches bounds these. A larger one
reserves memory when it *is* so large, not when the site announces it:

- A medium body grows in steps out of the memory of medium bodies. It never waits for it.
- A body that is large, or that found no memory of medium bodies, reserves its announced length, or
  the most that it may have, out of the memory of large bodies. It waits for that, and then needs no
  more. So a body that holds memory of large bodies never waits, and no two bodies wait for each
  other.

When a body has arrived, it returns what it did not use, and keeps the rest until its `PageMemory`
is released: the page is in memory until it is stored. While another caller waits for memory, a
higher minimum rate applies to large bodies, so that a slow one fails and frees its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec
import trio

from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.errors import NoMemoryForBody, TimedOut
from conveyor.http_client.exchange import Exchange, until
from conveyor.http_client.fair_permits import Bounds, FairPermits
from conveyor.ports.executor import Executor, T
from conveyor.ports.gateway import PageMemory

# Measured: a call in a thread costs 0.1 ms, decoding this much of a page 0.4 ms. A larger value
# blocks the event loop for longer; a smaller one pays for a thread where decoding is cheaper.
INLINE_ENCODED_BYTES_MAX = 32 * 1024
# The event loop decodes a small page for at most this CPU time; the rest goes to a thread. An
# honest small page needs less, so only crafted pages and moments of high load exceed it.
INLINE_CPU_S_MAX = 0.001
# Two threads in total and one per caller, so that decoding leaves a processor for other work and
# one caller cannot occupy both threads.
_DECODERS = Bounds.fixed(2, 1)


class ArrivingBody:
    """The memory of a body while it arrives. `bytes_max` is the most that the body may have;
    `covered_bytes` may arrive before it has to grow again."""

    __slots__ = ("_memory", "bytes_max", "covered_bytes", "exchange", "held", "partition")

    def __init__(
        self, memory: BodyMemory, partition: str, exchange: Exchange, bytes_max: int
    ) -> None:
        self._memory = memory
        self.partition = partition
        self.exchange = exchange
        self.bytes_max = bytes_max
        self.covered_bytes: float = memory.unreserved_bytes
        self.held: Reserved | None = None

    async def grow(self, size_bytes: int) -> None:
        """Reserves memory for a body of which `size_bytes` have arrived. The wait for it does not
        count as a delay of the site."""
        await self._memory.grow(self, size_bytes)

    def close(self, page: PageMemory | None = None, size_bytes: int = 0) -> None:
        """Ends the arrival. With a `page`, `size_bytes` stay reserved until it is released."""
        if self.held is not None:
            self._memory.end(self, page, size_bytes)


class Reserved(msgspec.Struct, eq=False):
    """What one body holds of a share, since a time."""

    shares: FairPermits
    caller: str
    size_bytes: int
    since: float


class BodyMemory:
    """Owns the memory and sets the minimum rate of every large body that arrives."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self.unreserved_bytes = limits.unreserved_body_bytes
        self.medium = FairPermits(_bounds(limits.medium_bodies_bytes_max, limits))
        bounds = _bounds(limits.large_bodies_bytes_max, limits)
        self.large = FairPermits(bounds, on_contention=self._set_rates)
        self._large_bytes_max = bounds.max
        self._arriving: dict[ArrivingBody, None] = {}

    async def grow(self, body: ArrivingBody, size_bytes: int) -> None:
        if size_bytes > self._limits.large_body_bytes or not self._grow_medium(body, size_bytes):
            await self._reserve_large(body)

    def end(self, body: ArrivingBody, page: PageMemory | None, size_bytes: int) -> None:
        reserved, body.held = body.held, None
        assert reserved is not None
        self._arriving.pop(body, None)
        if page is None:
            self._release(reserved, reserved.size_bytes)
            return
        page.hold(lambda: self._release(reserved, reserved.size_bytes))
        if reserved.size_bytes > size_bytes:
            self._release(reserved, reserved.size_bytes - size_bytes)

    def _grow_medium(self, body: ArrivingBody, size_bytes: int) -> bool:
        """Doubles what the body holds, without waiting. Returns False if there is no memory."""
        held_bytes = 0 if body.held is None else body.held.size_bytes
        doubled = max(2 * self.unreserved_bytes, 2 * held_bytes, size_bytes)
        goal_bytes = min(doubled, body.bytes_max, self._limits.large_body_bytes)
        goal_bytes = max(goal_bytes, size_bytes)
        if not self.medium.acquire_nowait(body.partition, goal_bytes - held_bytes):
            return False
        if body.held is None:
            body.held = Reserved(self.medium, body.partition, 0, trio.current_time())
        body.held.size_bytes = body.covered_bytes = goal_bytes
        return True

    async def _reserve_large(self, body: ArrivingBody) -> None:
        # A body that is larger than the share of its caller holds all of the share.
        size_bytes = min(body.bytes_max, self._large_bytes_max)
        if not self.large.acquire_nowait(body.partition, size_bytes):
            body.exchange.stop_timer()
            try:
                with until(body.exchange.deadline):
                    await self.large.acquire(body.partition, size_bytes)
            except TimedOut as error:
                raise NoMemoryForBody("no memory for the body before the deadline") from error
        medium, now = body.held, trio.current_time()
        body.held = Reserved(self.large, body.partition, size_bytes, now)
        body.covered_bytes = inf
        if medium is not None:
            self._release(medium, medium.size_bytes)
        self._arriving[body] = None
        # Restart the measurement: the bytes so far arrived under the lower rate for small bodies.
        body.exchange.require_rate(self._limits.large_body_rate_min)
        self._set_rates()

    def _release(self, reserved: Reserved, size_bytes: int) -> None:
        reserved.size_bytes -= size_bytes
        # In seconds of a whole share, so that a caller is charged by size and time.
        used_s = (trio.current_time() - reserved.since) * size_bytes / self._large_bytes_max
        reserved.shares.release(reserved.caller, used_s, count=size_bytes)
        self._set_rates()

    def _set_rates(self) -> None:
        if not self._arriving:
            return
        limits, is_crowded = self._limits, self.large.is_contended
        rate = limits.crowded_body_rate_min if is_crowded else limits.large_body_rate_min
        for body in self._arriving:
            body.exchange.change_rate(rate)


def _bounds(total_bytes: int, limits: PoolLimits) -> Bounds:
    return Bounds.fixed(total_bytes, total_bytes if limits.has_one_caller else total_bytes // 2)


class Decoding:
    """Runs decoding steps in the executor, or in the event loop if there is none."""

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor
        self._shares = FairPermits(_DECODERS)

    async def run(self, partition: str, step: Callable[[], T]) -> T:
        if self._executor is None:
            await trio.lowlevel.checkpoint()
            return step()
        await self._shares.acquire(partition)
        begun_at = trio.current_time()
        try:
            return await self._executor.run(step)
        finally:
            self._shares.release(partition, trio.current_time() - begun_at)
