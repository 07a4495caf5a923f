"""Wraps the real gateway of a simulated process: every call becomes a `Fetch` of the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import trio

from conveyor.domain.budget import Price
from conveyor.ports.gateway import Gateway, Outcome, ScrapeRequest
from conveyor.simulation.client_history import CURRENT_FETCH, Fetch, History
from conveyor.simulation.faults.fault_injector import FaultInjector, PoisonedInput
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.invariant_monitor import InvariantMonitor

RAISING_PATH = "/raises/"
"""A URL that contains this crashes its handler."""


@dataclass(frozen=True, slots=True)
class RecordingGateway:
    """Records each fetch in the history, and shows it to the checkers when it begins."""

    inner: Gateway
    injector: FaultInjector
    history: History
    monitor: InvariantMonitor

    def price(self, params: Mapping[str, str]) -> Price:
        return self.inner.price(params)

    def _raise_if_poisoned(self, request: ScrapeRequest) -> None:
        """Raises for some URLs, as a parser does for an input that it was not written for."""
        if RAISING_PATH in request.url:
            self.injector.faults.count(Fault.TASK_POISONED)
            raise PoisonedInput(f"no handler copes with {request.url}")

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.injector.check()
        run_id, task_id, claim_id = request.identity.split("-")
        fetch = Fetch(
            process=self.injector.name,
            run_id=run_id,
            task_id=task_id,
            claim_id=claim_id,
            started_at=trio.current_time(),
            price_credits=self.inner.price(request.params).credits,
        )
        self.history.fetches.append(fetch)
        self.injector.trace.note(self.injector.name, "fetches", request.identity)
        self.monitor.on_fetch(fetch)
        marker = CURRENT_FETCH.set(fetch)
        try:
            self._raise_if_poisoned(request)
            outcome = await self.inner.scrape(request)
            fetch.outcome = type(outcome).__name__
        finally:
            CURRENT_FETCH.reset(marker)
            fetch.ended_at = trio.current_time()
        self.injector.trace.note(
            self.injector.name, "fetched", f"{request.identity}: {type(outcome).__name__}"
        )
        return outcome
