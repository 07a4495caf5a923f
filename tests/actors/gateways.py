"""Remote gateways for tests of actors: with a limit of concurrent calls, with outages, and with
targets that always fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import trio

from actors.tree import LocalSignals, Mailboxes
from conveyor.domain.budget import Price
from conveyor.domain.errors import make_problem
from conveyor.domain.model import FailureReason
from conveyor.ports.gateway import (
    Contact,
    GatewayReport,
    NotScraped,
    Outcome,
    Scraped,
    ScrapeRequest,
)
from conveyor.usecases.context import RuntimeConfig
from tests.actors.world import World, a_page, make_world


@dataclass(slots=True)
class PlanGateway:
    """Accepts `plan` concurrent calls, states the limit in every answer, and refuses other calls.

    A call that is interrupted continues here until it would have ended. `states` replaces the
    stated limit with a false one."""

    plan: int | None = 20
    think_s: float = 0.2
    slow: Mapping[str, float] = field(default_factory=dict)
    contact: Contact = Contact.ANSWERED
    poisoned: frozenset[str] = frozenset()
    retry_after_s: float | None = None
    states: Callable[[int, int], tuple[int | None, int | None]] = lambda plan, left: (plan, left)
    calls: Counter[str] = field(default_factory=Counter)
    paid: Counter[str] = field(default_factory=Counter)
    working_until: list[float] = field(default_factory=list)
    inflight_count: int = 0
    inflight_max: int = 0
    working_max: int = 0
    refused_count: int = 0

    def price(self, params: Mapping[str, str]) -> Price:
        return Price(1)

    @property
    def working_count(self) -> int:
        now = trio.current_time()
        self.working_until = [until for until in self.working_until if until > now]
        return len(self.working_until)

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.calls[request.url] += 1
        self.inflight_count += 1
        self.inflight_max = max(self.inflight_max, self.inflight_count)
        try:
            return await self._work(request)
        finally:
            self.inflight_count -= 1

    async def _work(self, request: ScrapeRequest) -> Outcome:
        await trio.sleep(0.001)
        if self.contact is not Contact.ANSWERED or request.url in self.poisoned:
            failed = self.contact if self.contact is not Contact.ANSWERED else Contact.FAILED
            return a_failure(GatewayReport(contact=failed))
        if self.plan is not None and self.working_count >= self.plan:
            self.refused_count += 1
            return a_failure(self._report(Contact.REFUSED))
        ends_at = trio.current_time() + self.slow.get(request.url, self.think_s)
        self.working_until.append(ends_at)
        self.working_max = max(self.working_max, len(self.working_until))
        self.paid[request.url] += 1
        await trio.sleep_until(ends_at)
        return replace_report(a_page(), self._report(Contact.ANSWERED))

    def _report(self, contact: Contact) -> GatewayReport:
        if self.plan is None:
            return GatewayReport(contact=contact, retry_after_s=self.retry_after_s)
        limit, remaining = self.states(self.plan, max(0, self.plan - self.working_count))
        return GatewayReport(
            contact=contact, limit=limit, remaining=remaining, retry_after_s=self.retry_after_s
        )


def replace_report(page: Scraped, report: GatewayReport) -> Scraped:
    return Scraped(
        status=page.status,
        content_type=page.content_type,
        body=page.body,
        credits=1,
        report=report,
    )


def a_failure(report: GatewayReport) -> NotScraped:
    problem = make_problem("gateway_503", "The gateway failed", 503)
    return NotScraped(
        reason=FailureReason.GATEWAY_ERROR, problem=problem, retryable=True, report=report
    )


def make_remote_world(gateway: PlanGateway, *, capacity: int = 200) -> World:
    """A world whose pages are fetched by a remote gateway."""
    world = make_world(capacity=capacity)
    env = replace(world.env, config=RuntimeConfig(targets=None))
    return replace(world, env=env, gateway=gateway)  # type: ignore[arg-type]


def another_process(world: World, owner: str) -> World:
    """A second worker with the same engine and the same gateway."""
    other = make_world(capacity=world.limiter.capacity)
    mail = Mailboxes()
    signals = LocalSignals(mail.discovery.address, mail.streamer.address)
    env = replace(world.env, process_id=owner, signals=signals)
    return replace(other, env=env, engine=world.engine, mail=mail, gateway=world.gateway)
