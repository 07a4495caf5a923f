"""What costs much memory or computing: large bodies and their decoding, shared out among callers.

Few large bodies are in memory at a time, and no caller holds the permits for all of them. A body
needs one once it *is* large: what a site announces costs nothing. While another caller waits for a
permit, a body that arrives slowly gives up its own.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.exchange import Exchange, until
from conveyor.http_client.fair_permits import Bounds, FairPermits
from conveyor.ports.executor import Executor, T

# Measured: to hand work to a thread and back takes 0.1 ms, to decode so much of a page 0.4 ms.
INLINE_ENCODED_BYTES_MAX = 32 * 1024
# A small page that takes longer is no honest one, or came at a bad moment.
INLINE_CPU_S_MAX = 0.001
# Decoding leaves a processor to everything else; each caller may use one thread at a time.
_DECODERS = Bounds.fixed(2, 1)


class LargeBody:
    """One body on its way, which may turn out to be large."""

    __slots__ = ("_permits", "is_held", "partition", "reading", "since")

    def __init__(self, permits: LargeBodies, partition: str, reading: Exchange) -> None:
        self._permits = permits
        self.partition = partition
        self.reading = reading
        self.is_held = False
        self.since = 0.0

    async def acquire(self) -> None:
        """Takes the permit, once. Waiting for it is not the site's delay."""
        if not self.is_held:
            await self._permits.acquire(self)

    def close(self) -> None:
        if self.is_held:
            self._permits.release(self)


class LargeBodies:
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
            body.reading.stop_timer()
            with until(body.reading.deadline):
                await self.shares.acquire(body.partition)
        body.is_held = True
        body.since = trio.current_time()
        self._held[body] = None
        body.reading.require_rate(self._limits.large_body_rate_min)
        self._set_rates()

    def _set_rates(self) -> None:
        limits, is_crowded = self._limits, self.shares.is_contended
        rate = limits.crowded_body_rate_min if is_crowded else limits.large_body_rate_min
        for body in self._held:
            body.reading.change_rate(rate)


class Decoding:
    """Runs steps of decoding, in threads where there are some."""

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
