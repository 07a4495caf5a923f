"""A browser pool in the process of the test, with the resolver and the sockets of the test."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import trio

from conveyor.engines.executor import ThreadExecutor
from conveyor.gateway.browser.chromium import Launcher, find_chromium
from conveyor.gateway.browser.pool import BrowserPool
from conveyor.gateway.call import Call, call_from
from conveyor.gateway.content import own_support
from conveyor.gateway.guarding_proxy import GuardingProxy


@asynccontextmanager
async def running_pool(
    proxy: GuardingProxy, *, pages_max: int = 4, memory_mb_max: int = 2000
) -> AsyncGenerator[BrowserPool, None]:
    path = find_chromium(None, os.environ)
    assert path is not None
    launcher = Launcher(path=path, environ=os.environ, executor=ThreadExecutor(2))
    pool = BrowserPool(launcher, proxy, pages_max=pages_max, memory_mb_max=memory_mb_max)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        yield pool
        nursery.cancel_scope.cancel()


def a_rendering(url: str, params: Mapping[str, str] | None = None) -> Call:
    query = {"url": url, "js_render": "true", **(params or {})}
    return call_from("GET", query, [], b"", partition="anna", support=own_support({}))
