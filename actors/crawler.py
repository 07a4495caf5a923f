"""Crawler: follows the links of fetched pages, for crawls that are due (docs/crawls.md).

Owns:    the crawls that it works on, a few at a time, and what it remembers of them.
Hears:   nothing: the rows are the queue, which is queried every `period_s`.
Says:    nothing. A step tells the workers that its run has new tasks.
Crashes: only by bug. An interrupted crawl is due again and goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.limiters.fair_turns import FairTurns
from actors.runtime import bounded_cleanup
from actors.worker_roster import Roster
from conveyor.domain import limits
from conveyor.domain.crawl_record import Crawl
from conveyor.domain.ids import CallerId, JobId
from conveyor.ports.errors import Unavailable
from conveyor.usecases import crawl as crawls
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.crawl import Advance, CrawlMemory

log = logging.getLogger(__name__)

# A crawl that crashed its crawler so often is ended.
CRASHES_MAX = 5
# Periods between two looks while no crawl is due: a new crawl may wait so long, and a service
# without crawls pays for the looks.
_IDLE_PERIODS = 5
# Due crawls per query. With fewer, those of one caller could fill the page, and those of other
# callers would not be seen.
DUE_MAX = 1_000
# How long a process works on one crawl before it is due again, and how long while others wait. Each
# turn costs two writes.
TURN_S, SHARED_TURN_S = 10.0, 2.0
# When a crawl whose pages are being fetched is due again, if it has left its turn to others.
REST_S = 1.0
# How long the crawler waits for pages between two claims.
WAIT_S = limits.CRAWL_CLAIM_S / 3
# How long a cancelled crawler may take to hand over its crawl.
HAND_OVER_S = 2.0
# Crawls of which something is remembered between two turns.
_REMEMBERED_MAX = 32


@dataclass(slots=True)
class _Contention:
    """Tells the crawls in progress whether others wait for their places."""

    others_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Crawler:
    env: Context
    roster: Roster = field(default_factory=Roster.of_one)
    period_s: float = 0.2
    # More at once need more memory: each has the bodies of a group of pages.
    at_once_max: int = 4
    memories: dict[JobId, CrawlMemory] = field(default_factory=dict)
    crashes: Counter[JobId] = field(default_factory=Counter)

    async def run(self) -> None:
        under_way: dict[JobId, CallerId] = {}
        # All of them: turns are short when another caller waits.
        turns = FairTurns(at_once_max=self.at_once_max, caller_max=self.at_once_max)
        contention = _Contention()
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    due = [
                        (crawl, crawl.caller)
                        for crawl in await crawls.due(self.env, limit=DUE_MAX)
                        if crawl.job_id not in under_way
                    ]
                    chosen = turns.choose(due, under_way.values())
                    contention.others_wait = len(due) > len(chosen)
                    for crawl, caller in chosen:
                        under_way[crawl.job_id] = caller
                        nursery.start_soon(self._work_on, crawl, contention, under_way)
                except Unavailable as error:
                    log.warning("crawls not read", extra={"cause": str(error)})
                if under_way:
                    await trio.sleep(self.period_s)
                else:
                    await self.roster.wait_turn("crawls", _IDLE_PERIODS * self.period_s)

    async def _work_on(
        self, crawl: Crawl, contention: _Contention, under_way: dict[JobId, CallerId]
    ) -> None:
        extra = {"job": crawl.job_id}
        memory = self.memories.pop(crawl.job_id, None) or CrawlMemory()
        self.memories[crawl.job_id] = memory
        while len(self.memories) > _REMEMBERED_MAX:
            del self.memories[next(iter(self.memories))]
        try:
            take_turn = partial(self._take_turn, crawl, memory, contention)
            outcome = await isolate(take_turn, "a crawl", extra=extra)
            if not isinstance(outcome, Crash):
                self.crashes.pop(crawl.job_id, None)
                return
            self.crashes[crawl.job_id] += 1
            if self.crashes[crawl.job_id] >= CRASHES_MAX:
                del self.crashes[crawl.job_id]
                await crawls.give_up(self.env, crawl)
        except Unavailable as error:
            log.warning("crawl deferred: engine unavailable", extra={**extra, "cause": str(error)})
        finally:
            del under_way[crawl.job_id]

    async def _take_turn(self, crawl: Crawl, memory: CrawlMemory, contention: _Contention) -> None:
        """Advances a crawl for a turn. Then it is due again, here or in another process. While
        others wait, the turn is short, and it ends when nothing can be read."""
        began_at = trio.current_time()
        due_in_s = 0.0

        def is_over() -> bool:
            turn_s = SHARED_TURN_S if contention.others_wait else TURN_S
            return trio.current_time() >= began_at + turn_s

        try:
            while not is_over():
                claimed = await crawls.claim(self.env, crawl, due_in_s=limits.CRAWL_CLAIM_S)
                if claimed is None:
                    return
                crawl, outcome = await self._advance_until_idle(claimed, memory, is_over)
                if outcome in {Advance.LOST, Advance.DONE}:
                    return
                if outcome is Advance.IDLE and contention.others_wait:
                    due_in_s = REST_S
                    break
                if outcome is Advance.IDLE:
                    await self._wait_for_pages(crawl, memory, contention)
            await crawls.claim(self.env, crawl, due_in_s=due_in_s)
        except trio.Cancelled:
            with bounded_cleanup(HAND_OVER_S), suppress(Unavailable):  # The claim lapses.
                await crawls.claim(self.env, crawl, due_in_s=0.0)
            raise

    async def _advance_until_idle(
        self, crawl: Crawl, memory: CrawlMemory, is_over: Callable[[], bool]
    ) -> tuple[Crawl, Advance]:
        """Takes steps. Each step also renews the claim."""
        while True:
            outcome, advanced = await crawls.advance(self.env, crawl, memory)
            crawl = advanced or crawl
            if outcome is not Advance.ADVANCED or is_over():
                return crawl, outcome

    async def _wait_for_pages(
        self, crawl: Crawl, memory: CrawlMemory, contention: _Contention
    ) -> None:
        """Waits until another page has been fetched, or another crawl waits for a turn."""
        until = trio.current_time() + WAIT_S
        await trio.sleep(self.period_s)
        while trio.current_time() < until and not contention.others_wait:
            if await crawls.has_news(self.env, crawl, memory):
                return
            await trio.sleep(self.period_s)
