"""Shares the memory for large bodies and the threads that decode them among the callers.

Few large bodies are in memory at a time, and no caller can hold the permits for all of them. A body
needs a permit when it *is* large, not when the site announces a large length. While another caller
waits for a permit, a higher minimum rate applies, so that a slow body fails and frees its permit.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.exchange import Exchange, until
from conveyor.http_client.fair_permits import Bounds, FairPermits
from conveyor.ports.executor import Executor, T

# Measured: a call in a thread costs 0.1 ms, decoding this much of a page 0.4 ms. A larger value
# blocks the event loop for longer; a smaller one pays for a thread where decoding is cheaper.
INLINE_ENCODED_BYTES_MAX = 32 * 1024
# The event loop decodes a small page for at most this CPU time; the rest goes to a thread. An
# honest small page needs less, so only crafted pages and moments of high load exceed it.
INLINE_CPU_S_MAX = 0.001
# Two threads in total and one per caller, so that decoding leaves a processor for other work and
# one caller cannot occupy both threads.
_DECODERS = Bounds.fixed(2, 1)


class LargeBody:
    """A body that is arriving and may turn out to be large."""

    __slots__ = ("_permits", "exchange", "is_held", "partition", "since")

    def __init__(self, permits: LargeBodies, partition: str, exchange: Exchange) -> None:
        self._permits = permits
        self.partition = partition
        self.exchange = exchange
        self.is_held = False
        self.since = 0.0

    async def acquire(self) -> None:
        """Takes the permit, once. The wait for it does not count as a delay of the site."""
        if not self.is_held:
            await self._permits.acquire(self)

    def close(self) -> None:
        if self.is_held:
            self._permits.release(self)


class LargeBodies:
    """Owns the permits and sets the minimum rate of every body that holds one."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        bounds = Bounds.fixed(limits.large_bodies_max, limits.large_bodies_per_caller_max)
        self.shares = FairPermits(bounds, on_contention=self._set_rates)
        self._held: dict[LargeBody, None] = {}

    def release(self, body: LargeBody) -> None:
        del self._held[body]
        self.shares.release(body.partition, trio.current_time() - body.since)
        self._set_rates()

    async def acquire(self, body: LargeBody) -> None:
        if not self.shares.acquire_nowait(body.partition):
            body.exchange.stop_timer()
            with until(body.exchange.deadline):
                await self.shares.acquire(body.partition)
        body.is_held = True
        body.since = trio.current_time()
        self._held[body] = None
        # Restart the measurement: the bytes so far arrived under the lower rate for small bodies.
        body.exchange.require_rate(self._limits.large_body_rate_min)
        self._set_rates()

    def _set_rates(self) -> None:
        limits, is_crowded = self._limits, self.shares.is_contended
        rate = limits.crowded_body_rate_min if is_crowded else limits.large_body_rate_min
        for body in self._held:
            body.exchange.change_rate(rate)


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
