"""Env: everything a use case needs from outside, in one value; tests and the simulator make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from conveyor.domain import ids, limits
from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.admission import Path, choose_path
from conveyor.domain.changes import Applied, Change, Verdict
from conveyor.domain.randomness import Random
from conveyor.ports.aside import Aside, T
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.signals import Signals
from conveyor.ports.store import Store
from conveyor.ports.vault import Vault
from conveyor.usecases import feeds
from conveyor.usecases.feeds import News


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an operator may tune; pinned on rows where a later change must not reach them.

    `at_once_max` is how many tasks the engine takes in one transaction with their job,
    `chunk_tasks` how many a step of an ingest or a walk takes. `targets` is what our own fetches
    may reach; None when a gateway elsewhere fetches. `webhooks` is what our deliveries may reach.
    `knows_costs` when the gateway has prices in money.
    """

    sync_tasks_max: int = limits.SYNC_TASKS_MAX
    at_once_max: int = limits.AT_ONCE_TASKS_MAX
    chunk_tasks: int = field(default_factory=lambda: limits.CHUNK_TASKS)
    shard_count: int = limits.TASK_SHARD_COUNT
    max_inflight: int = limits.MAX_INFLIGHT
    targets: TargetPolicy | None = field(default_factory=TargetPolicy)
    webhooks: TargetPolicy = field(default_factory=TargetPolicy)
    teardown_s: float = 5.0
    knows_costs: bool = True

    def path_for(self, tasks_count: int) -> Path:
        return choose_path(tasks_count, at_once_max=self.at_once_max, sync_max=self.sync_tasks_max)


class Here:
    """Work done on the spot: for worlds without threads."""

    async def do(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """The ports, the randomness (secrets are drawn from it too) and the name of this process
    start."""

    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator
    clock: Clock
    vault: Vault
    signals: Signals
    random: Random
    owner: str
    policy: Policy = field(default_factory=Policy)
    news: News = field(default_factory=News)
    aside: Aside = field(default_factory=Here)

    def now(self) -> float:
        return self.clock.now()

    def mint(self) -> str:
        return ids.mint_ulid(self.clock.now(), self.random)

    async def commit(self, change: Change) -> Verdict:
        """Applies a change; events that it tells of are given their places behind it."""
        (verdict,) = await self.store.commit((change,))
        if isinstance(verdict, Applied):
            await feeds.place_told(self.store, self.news, change)
        return verdict
