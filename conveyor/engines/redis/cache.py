"""RedisCache: stores short-lived texts on a Redis server, by the server's clock
(docs/engines.md, Counter cache).

After a failed call the cache is bypassed for `ALONE_S`. Counters that this process showed meanwhile
could not invalidate the entries of other processes. So for one more lifetime of an entry this
process accepts no entry and reads from the store.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import trio

from conveyor.domain import limits
from conveyor.domain.ids import Random
from conveyor.engines.redis.connection import Keys, RedisConnection, Script, new_token, translating
from conveyor.ports.cache import CachedValue, ReadTicket
from conveyor.ports.errors import Unavailable

_LOOK, _KEEP, _FORGET = Script("cache_get"), Script("cache_put"), Script("cache_delete")

# Reading the counters from the store takes no longer, so waiting longer for the cache is useless.
ANSWER_S = 0.5
# How long the cache is bypassed after a failure. A shorter time calls a failing server more often.
# `get` asserts that no entry lives longer than this.
ALONE_S = limits.CACHED_COUNTERS_TTL_S

# What the script may leave in place: entries and tickets, entries only, or nothing. The numbers are
# arguments of cache_get.lua.
_ALL_MAY_STAND, _TEXTS_MAY_STAND, _NOTHING_MAY_STAND = range(3)


class RedisCache:
    """`outcomes` counts the calls of `get` by their outcome."""

    def __init__(
        self, link: RedisConnection, random: Random, *, space: str, answer_s: float = ANSWER_S
    ) -> None:
        self._link = link
        self._random = random
        self._keys = Keys(space)
        self._failed_at = float("-inf")
        self._answer_s = answer_s
        self.outcomes: Counter[str] = Counter()

    async def get(
        self, name: str, version: str, *, ttl_s: float, insists: bool = False
    ) -> CachedValue | ReadTicket | None:
        assert ttl_s <= ALONE_S
        ticket = ReadTicket(new_token(self._random))
        acceptable = _TEXTS_MAY_STAND if insists else _ALL_MAY_STAND
        # The bypass is over, but entries from the time of the bypass may be older than what this
        # process has shown meanwhile. They have all expired after one more lifetime.
        if self._failed_s_ago() < ALONE_S + ttl_s:
            acceptable = _NOTHING_MAY_STAND
        args: list[str | int] = [round(ttl_s * 1_000_000), version, ticket.token, acceptable]
        try:
            outcome, text = await self._run(_LOOK, name, args)
        except Unavailable:
            self.outcomes["away"] += 1
            raise
        self.outcomes[outcome] += 1
        if outcome == "found":
            return CachedValue(text)
        return ticket if outcome == "yours" else None

    async def put(self, name: str, ticket: ReadTicket, text: str) -> CachedValue | None:
        current = await self._run(_KEEP, name, [ticket.token, text])
        return CachedValue(current) if current else None

    async def delete(self, name: str) -> None:
        await self._run(_FORGET, name, [])

    async def _run(self, script: Script, name: str, args: list[str | int]) -> Any:
        if self._failed_s_ago() < ALONE_S:
            raise Unavailable(f"Redis: not called for {ALONE_S:g} s after a failure")
        try:
            with translating(self._answer_s):
                return await self._link.run(script, [self._keys.cached(name)], args)
        except Unavailable:
            # The time after the call: the bypass begins when the failure is known.
            self._failed_at = trio.current_time()
            raise

    def _failed_s_ago(self) -> float:
        return trio.current_time() - self._failed_at
