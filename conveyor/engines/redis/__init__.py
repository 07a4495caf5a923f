"""The Redis engine: leases, doors and marks by the server's clock, and signals (SPEC 6.7, 6.8)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from conveyor.domain.randomness import Random
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.link import RedisLink, open_link
from conveyor.engines.redis.signals import RedisSignals
from conveyor.engines.redis.steady import SteadyCoordinator

__all__ = ["RedisEngine", "RedisSignals", "open_redis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisEngine:
    link: RedisLink
    coordinator: SteadyCoordinator


@asynccontextmanager
async def open_redis(
    url: str, *, random: Random, space: str, workers_on: str
) -> AsyncGenerator[RedisEngine, None]:
    """`space` keeps those apart who share a server; it need not be there yet."""
    async with open_link(url) as link, trio.open_nursery() as nursery:
        remote = RedisCoordinator(link, random, space=space)
        coordinator = SteadyCoordinator(remote, random, workers_on=workers_on)
        nursery.start_soon(coordinator.mend_forever)
        yield RedisEngine(link=link, coordinator=coordinator)
        nursery.cancel_scope.cancel()
