"""The Redis engine: leases, doors, marks and a cache by its own clock, and signals
(docs/engines.md, Redis)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from conveyor.domain.randomness import Random
from conveyor.engines.redis.cache import RedisCache
from conveyor.engines.redis.connection import Note, RedisChannel, RedisConnection, no_op, open_link
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.fallback_coordinator import FallbackCoordinator

__all__ = ["RedisEngine", "open_redis", "running_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisEngine:
    coordinator: FallbackCoordinator
    channel: RedisChannel
    cache: RedisCache


@asynccontextmanager
async def open_redis(
    url: str,
    *,
    random: Random,
    space: str,
    owner: str,
    workers_on: str,
    note: Note = no_op,
) -> AsyncGenerator[RedisEngine, None]:
    """`space` keeps those apart who share a server, which need not be there yet; `owner` names this
    process, and `workers_on` the subject on which workers leave the mark of their presence; `note`
    is told of every command, by name."""
    async with (
        open_link(url, note) as link,
        running_on(link, random=random, space=space, owner=owner, workers_on=workers_on) as engine,
    ):
        yield engine


@asynccontextmanager
async def running_on(
    link: RedisConnection, *, random: Random, space: str, owner: str, workers_on: str
) -> AsyncGenerator[RedisEngine, None]:
    """The engine over any link; see `open_redis`."""
    async with trio.open_nursery() as nursery:
        remote = RedisCoordinator(link, random, space=space)
        coordinator = FallbackCoordinator(remote, random, workers_on=workers_on)
        nursery.start_soon(coordinator.reconnect_forever)
        channel = RedisChannel(link, space=space, owner=owner)
        cache = RedisCache(link, random, space=space)
        yield RedisEngine(coordinator=coordinator, channel=channel, cache=cache)
        nursery.cancel_scope.cancel()
