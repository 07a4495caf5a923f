"""The table of caches that the laws are tested with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random

import pytest

from conveyor.engines.redis.cache import RedisCache
from conveyor.engines.redis.connection import open_link
from conveyor.ports.cache import Cache
from conveyor.ports.clock import Clock
from conveyor.simulation.models import FaultSource, RedisModel
from tests.conformance.coordinators import REDIS_ANSWER_S, LinkAt, a_space


@asynccontextmanager
async def _on_redis(
    name: str, request: pytest.FixtureRequest, clock: Clock
) -> AsyncGenerator[Cache, None]:
    async with open_link(request.getfixturevalue(name)) as link:
        yield RedisCache(LinkAt(link, clock), Random(1), space=a_space(), answer_s=REDIS_ANSWER_S)


@asynccontextmanager
async def _on_modelled_redis(
    name: str, request: pytest.FixtureRequest, clock: Clock
) -> AsyncGenerator[Cache, None]:
    yield a_modelled_cache(clock)


def a_modelled_cache(clock: Clock) -> RedisCache:
    model = RedisModel(clock=clock, fault_source=FaultSource(random=Random(1)))
    return RedisCache(model.link(), Random(1), space="s")


Opener = Callable[[str, pytest.FixtureRequest, Clock], AbstractAsyncContextManager[Cache]]
CACHES: dict[str, Opener] = {
    "redis": _on_redis,
    "redis-modelled": _on_modelled_redis,
    "redis_cluster": _on_redis,
}
