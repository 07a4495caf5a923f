"""The Redis engine: leases, host pools, status reports, a cache and signals
(docs/engines.md, Redis)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from conveyor.domain.ids import Random
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
    """Opens the engine. The server need not be reachable yet.

    `space` is the common prefix of all keys, and separates deployments that share a server. `owner`
    names this process. `workers_on` is the subject of the status reports by which workers are
    counted. `note` is called with the name of every command.
    """
    async with (
        open_link(url, note) as link,
        running_on(link, random=random, space=space, owner=owner, workers_on=workers_on) as engine,
    ):
        yield engine


@asynccontextmanager
async def running_on(
    link: RedisConnection, *, random: Random, space: str, owner: str, workers_on: str
) -> AsyncGenerator[RedisEngine, None]:
    """Runs the engine over any connection; see `open_redis`."""
    async with trio.open_nursery() as nursery:
        remote = RedisCoordinator(link, random, space=space)
        coordinator = FallbackCoordinator(remote, random, workers_on=workers_on)
        # It waits until Redis is lost, reconnects, and ends with this context.
        nursery.start_soon(coordinator.reconnect_forever)
        channel = RedisChannel(link, space=space, owner=owner)
        cache = RedisCache(link, random, space=space)
        yield RedisEngine(coordinator=coordinator, channel=channel, cache=cache)
        nursery.cancel_scope.cancel()
