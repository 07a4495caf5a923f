"""Wraps the real gateway of a simulated process: every call becomes a `Fetch` of the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import trio

from conveyor.domain.budget import Price
from conveyor.ports.gateway import Gateway, Outcome, ScrapeRequest
from conveyor.simulation.client_history import CURRENT_FETCH, Fetch, History
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.faults.process_faults import Poison, ProcessFaults
from conveyor.simulation.invariant_monitor import InvariantMonitor

RAISES = "/raises/"
"""A URL that contains this crashes its handler."""


@dataclass(frozen=True, slots=True)
class WatchedGateway:
    inner: Gateway
    life: ProcessFaults
    history: History
    watcher: InvariantMonitor

    def price(self, params: Mapping[str, str]) -> Price:
        return self.inner.price(params)

    def _crash_on(self, request: ScrapeRequest) -> None:
        """Raises for some URLs, as a parser does for an input that it was not written for."""
        if RAISES in request.url:
            self.life.faults.count(Fault.TASK_POISONED)
            raise Poison(f"no handler copes with {request.url}")

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.life.check()
        run_id, task_id, claim_id = request.identity.split("-")
        fetch = Fetch(
            process=self.life.name,
            run_id=run_id,
            task_id=task_id,
            claim_id=claim_id,
            started_at=trio.current_time(),
            price_credits=self.inner.price(request.params).credits,
        )
        self.history.fetches.append(fetch)
        self.life.trace.note(self.life.name, "fetches", request.identity)
        self.watcher.fetches(fetch)
        marker = CURRENT_FETCH.set(fetch)
        try:
            self._crash_on(request)
            outcome = await self.inner.scrape(request)
            fetch.outcome = type(outcome).__name__
        finally:
            CURRENT_FETCH.reset(marker)
            fetch.ended_at = trio.current_time()
        self.life.trace.note(
            self.life.name, "fetched", f"{request.identity}: {type(outcome).__name__}"
        )
        return outcome
