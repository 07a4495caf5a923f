"""The gateway of a simulated process: the real one, with every call on record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import trio

from conveyor.domain.budget import Price
from conveyor.ports.gateway import Gateway, Outcome, ScrapeRequest
from conveyor.simulation.history import Fetch, History
from conveyor.simulation.life import Life
from conveyor.simulation.watcher import Watcher


@dataclass(frozen=True, slots=True)
class WatchedGateway:
    inner: Gateway
    life: Life
    history: History
    watcher: Watcher

    def price(self, params: Mapping[str, str]) -> Price:
        return self.inner.price(params)

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.life.check()
        run_id, task_id, claim = request.identity.split("-")
        fetch = Fetch(
            process=self.life.name,
            run_id=run_id,
            task_id=task_id,
            claim=int(claim),
            started_at=trio.current_time(),
        )
        self.history.fetches.append(fetch)
        self.life.trace.note(self.life.name, "fetches", request.identity)
        self.watcher.fetches(fetch)
        try:
            outcome = await self.inner.scrape(request)
        finally:
            fetch.ended_at = trio.current_time()
        self.life.trace.note(
            self.life.name, "fetched", f"{request.identity}: {type(outcome).__name__}"
        )
        return outcome
