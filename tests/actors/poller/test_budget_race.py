"""A budget is never exceeded: 50 workers compete for it, die, and lose answers, in virtual time.

Each seed is another history. CI runs a few; `BUDGET_SEEDS=1000` runs more, and `BUDGET_SEED=7`
runs the seventh alone."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock

from actors.lease_heartbeater import LeaseHeartbeater
from actors.limiters.fair_limiter import FairLimiter
from actors.limiters.storage_breaker import StorageBreaker
from actors.messages import HeartbeaterMessage, PollerMessage, ShardWriterMessage
from actors.poller.poller import RunPoller
from actors.runtime import Mailbox
from actors.shard_writer import ShardWriter
from actors.task_runner import TaskRunner
from conveyor.domain import limits
from conveyor.domain.budget import BudgetCap, BudgetReservation, Price, Unit
from conveyor.domain.changes import Applied, BudgetKey, Verdict
from conveyor.engines.memory import MemoryStore
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.usecases.context import Context
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.world import World, a_miss, a_page, make_world, urls

WORKERS = 50
TASKS = 40
PRICE = 25
SEEDS = [int(os.environ["BUDGET_SEED"])] if "BUDGET_SEED" in os.environ else None
LIFETIMES_S = (0.5, 2.0, 5.0, 20.0, limits.CLAIM_TTL_S + 10)

P = TypeVar("P")


@dataclass(slots=True)
class Life:
    """One process. After its death it has no effect and gets no answers."""

    randomness: random.Random
    is_dead: bool = False

    async def go_on(self) -> None:
        await trio.sleep(self.randomness.choice((0.0, 0.0, 0.001, 0.02)))
        if self.is_dead:
            await trio.sleep_forever()


class _Mortal:
    """A port of a process that may die and that loses some answers."""

    def __init__(self, port: object, life: Life, loses: float) -> None:
        self._port = port
        self._life = life
        self._loses = loses

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._port, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._life.go_on()
            answer = await target(*args, **kwargs)
            await self._life.go_on()
            if self._life.randomness.random() < self._loses:
                raise Unavailable("the answer was lost")
            return answer

        return call


def mortal(port: P, life: Life, *, loses: float) -> P:
    return cast("P", _Mortal(port, life, loses))


@dataclass(slots=True)
class Bank:
    """The gateway. It records what it charged, early or late in a call, also after the caller is
    gone."""

    randomness: random.Random
    cap: int
    billed: int = 0
    calls: int = 0
    overshoots: list[int] = field(default_factory=list)

    def price(self, params: Mapping[str, str]) -> Price:
        return Price(credits=PRICE)

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.calls += 1
        cost = self.randomness.choice((0, 1, 5, PRICE, PRICE))
        is_early = self.randomness.random() < 0.5
        self._bill(cost if is_early else 0)
        await trio.sleep(self.randomness.choice((0.0, 0.3, 4.0)))
        self._bill(0 if is_early else cost)
        outcome: Outcome = a_miss() if self.randomness.random() < 0.2 else a_page()
        if self.randomness.random() < 0.2:
            return msgspec.structs.replace(outcome, cost_known=False)
        return msgspec.structs.replace(outcome, credits=cost)

    def _bill(self, cost: int) -> None:
        self.billed += cost
        if self.billed > self.cap:
            self.overshoots.append(self.billed)


class Ledger(MemoryStore):
    """A store that records the last value of every budget reservation."""

    shares: dict[str, BudgetReservation]

    async def commit(self, changes: Any) -> list[Verdict]:
        verdicts = await super().commit(changes)
        for verdict in verdicts:
            if isinstance(verdict, Applied):
                self.shares |= {
                    row.holder: row for row in verdict.rows if isinstance(row, BudgetReservation)
                }
        return verdicts


def view_of(world: World, life: Life) -> Context:
    return replace(
        world.env,
        store=mortal(world.env.store, life, loses=0.02),
        queue=mortal(world.env.queue, life, loses=0.01),
        coordinator=mortal(world.env.coordinator, life, loses=0.01),
        random=random.Random(life.randomness.random()),
    )


async def work(world: World, bank: Bank, accepted: Accepted, life: Life) -> None:
    """The work of a process on one run, until it is cancelled."""
    env = view_of(world, life)
    beats: Mailbox[HeartbeaterMessage] = Mailbox(capacity=100)
    settles: Mailbox[ShardWriterMessage] = Mailbox(capacity=100)
    news: Mailbox[PollerMessage] = Mailbox(capacity=4)
    storage = StorageBreaker(env.random)
    runner = TaskRunner(
        env=env,
        gateway=bank,
        heartbeater=beats.address,
        writers=[settles.address],
        metrics=world.metrics,
        storage=storage,
    )
    poller = RunPoller(
        env=env,
        job=accepted.job,
        run_at_start=accepted.run,
        limiter=FairLimiter(capacity=life.randomness.randint(1, 4)),
        run_task=runner.run,
        price=bank.price,
        metrics=world.metrics,
        storage=storage,
    )
    writer = ShardWriter(env=env, metrics=world.metrics)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LeaseHeartbeater(env=env).run, beats.open_inbox())
            nursery.start_soon(writer.run, settles.open_inbox())
            await poller.run(news.open_inbox())
            nursery.cancel_scope.cancel()
    except* Unavailable:
        life.is_dead = True


async def live(world: World, bank: Bank, accepted: Accepted, life: Life) -> None:
    """One process from its start to an orderly stop or a kill."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, world, bank, accepted, life)
            await trio.sleep(life.randomness.choice(LIFETIMES_S))
            life.is_dead = life.randomness.random() < 0.7
            scope.cancel()


async def a_history(seed: int) -> Bank:
    """A job that costs more than its budget, and workers that start and die."""
    randomness = random.Random(seed)
    world = make_world()
    ledger = Ledger(world.engine.queue)
    ledger.shares = {}
    world = replace(world, env=replace(world.env, store=ledger))
    cap = randomness.randint(1, 40) * PRICE // 2
    bank = Bank(randomness, cap)
    accepted = await world.submit(urls(TASKS), budget=BudgetCap(Unit.CREDITS, cap))
    async with trio.open_nursery() as nursery:
        for _ in range(WORKERS):
            life = Life(random.Random(randomness.random()))
            nursery.start_soon(live, world, bank, accepted, life)
    budget = await ledger.read(BudgetKey(accepted.run.job_id, accepted.run.run_id))
    assert budget is not None
    taken = sum(share.taken for share in ledger.shares.values())
    assert budget.left >= 0
    assert budget.left + taken == budget.cap == cap
    assert bank.billed <= taken
    assert bank.calls > 0 or budget.left < PRICE
    return bank


def play(seed: int) -> Bank:
    """Runs the history of a seed. Trio's scheduling is seeded too, so the same seed gives the same
    history."""
    scheduler: Any = trio._core._run
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        return trio.run(partial(a_history, seed), clock=MockClock(autojump_threshold=0.0))
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = False


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS or range(int(os.environ.get("BUDGET_SEEDS", "20"))))
def test_no_interleaving_of_workers_and_deaths_spends_more_than_the_budget(seed: int) -> None:
    bank = play(seed)

    assert bank.overshoots == []
