"""Crawler: follows the links of fetched pages, for crawls that are due (docs/crawls.md).

Owns:    the crawls that it works on, a few at a time, and what it remembers of them.
Hears:   nothing: the rows are the queue, which is queried every `period_s`.
Says:    nothing. A step tells the workers that its run has new tasks.
Crashes: only by bug. An interrupted crawl is due again and goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.limiters.fair_turns import FairTurns
from actors.worker_roster import Roster
from conveyor.domain.crawl_record import Crawl
from conveyor.domain.ids import CallerId, JobId
from conveyor.ports.errors import Unavailable
from conveyor.usecases import crawl as crawls
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.crawl import CrawlMemory, CrawlQueue

log = logging.getLogger(__name__)

# A crawl that crashed its crawler so often is ended.
CRASHES_MAX = 5
# Periods between two looks while no crawl is due: a new crawl may wait so long, and a service
# without crawls pays for the looks.
_IDLE_PERIODS = 5
# Due crawls per query. With fewer, those of one caller could fill the page, and those of other
# callers would not be seen.
DUE_MAX = 1_000
# Crawls of which something is remembered between two turns.
_REMEMBERED_MAX = 32


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
        queue = CrawlQueue()
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    due = [
                        (crawl, crawl.caller)
                        for crawl in await crawls.due(self.env, limit=DUE_MAX)
                        if crawl.job_id not in under_way
                    ]
                    chosen = turns.choose(due, under_way.values())
                    queue.others_wait = len(due) > len(chosen)
                    for crawl, caller in chosen:
                        under_way[crawl.job_id] = caller
                        nursery.start_soon(self._work_on, crawl, queue, under_way)
                except Unavailable as error:
                    log.warning("crawls not read", extra={"cause": str(error)})
                if under_way:
                    await trio.sleep(self.period_s)
                else:
                    await self.roster.wait_turn("crawls", _IDLE_PERIODS * self.period_s)

    async def _work_on(
        self, crawl: Crawl, queue: CrawlQueue, under_way: dict[JobId, CallerId]
    ) -> None:
        extra = {"job": crawl.job_id}
        memory = self.memories.pop(crawl.job_id, None) or CrawlMemory()
        self.memories[crawl.job_id] = memory
        while len(self.memories) > _REMEMBERED_MAX:
            del self.memories[next(iter(self.memories))]
        try:
            work = partial(crawls.work_on, self.env, crawl, memory, queue, idle_s=self.period_s)
            outcome = await isolate(work, "a crawl", extra=extra)
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
