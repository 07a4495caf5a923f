"""The Redis engine: leases, doors and marks by the server's clock, and signals (SPEC 6.7, 6.8)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from conveyor.domain.randomness import Random
from conveyor.engines.redis.channel import RedisChannel
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.link import Link, open_link
from conveyor.engines.redis.steady import SteadyCoordinator

__all__ = ["RedisEngine", "open_redis", "running_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisEngine:
    coordinator: SteadyCoordinator
    channel: RedisChannel


@asynccontextmanager
async def open_redis(
    url: str, *, random: Random, space: str, owner: str, workers_on: str
) -> AsyncGenerator[RedisEngine, None]:
    """`space` keeps those apart who share a server, which need not be there yet; `owner` names this
    process, and `workers_on` the subject on which workers leave the mark of their presence."""
    async with (
        open_link(url) as link,
        running_on(link, random=random, space=space, owner=owner, workers_on=workers_on) as engine,
    ):
        yield engine


@asynccontextmanager
async def running_on(
    link: Link, *, random: Random, space: str, owner: str, workers_on: str
) -> AsyncGenerator[RedisEngine, None]:
    """The engine over any link; see `open_redis`."""
    async with trio.open_nursery() as nursery:
        remote = RedisCoordinator(link, random, space=space)
        coordinator = SteadyCoordinator(remote, random, workers_on=workers_on)
        nursery.start_soon(coordinator.mend_forever)
        channel = RedisChannel(link, space=space, owner=owner)
        yield RedisEngine(coordinator=coordinator, channel=channel)
        nursery.cancel_scope.cancel()
