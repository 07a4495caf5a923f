"""Env: everything a use case needs from outside, in one value; tests and the simulator make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from conveyor.domain import ids, limits
from conveyor.domain.backpressure.permits import Backpressure
from conveyor.domain.changes import Applied, Change, Verdict
from conveyor.domain.quota import Quotas
from conveyor.domain.randomness import Random
from conveyor.domain.submit.admission import AdmissionMode, choose_path
from conveyor.domain.submit.ssrf import TargetPolicy
from conveyor.ports.blobs import Blobs
from conveyor.ports.cache import Cache
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.executor import Executor, T
from conveyor.ports.queue import Queue
from conveyor.ports.secret_box import SecretBox
from conveyor.ports.store import Store
from conveyor.ports.webhook_sender import WorkflowCallback
from conveyor.ports.worker_signals import Signals
from conveyor.usecases import event_log
from conveyor.usecases.event_log import EventWakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """How long things wait for company: where each call has its price, longer (decision 0012).

    A group of settles waits `settle_s`, or for `settle_max`. A poller waits `receive_share` of what
    a task takes, or for the room that one receive fills, and receives up to `receive_max`.
    """

    settle_s: float = 0.01
    settle_max: int = limits.INLINE_TASKS_MAX
    receive_share: float = 0.0
    receive_max: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """How many seconds pass between two looks for what is due, where nobody tells of it.

    A batch that has not moved for `stalled_s` is one that nobody walks any more.
    """

    discover_s: float = 10.0
    helper_discover_s: float = 0.25
    notices_s: float = 1.0
    schedules_s: float = 1.0
    exports_s: float = 0.5
    scrubs_s: float = 2.0
    sweeps_s: float = 15.0
    stalled_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What an operator may tune; pinned on rows where a later change must not reach them.

    `at_once_max` is how many tasks the engine takes in one transaction with their job,
    `chunk_tasks` how many a step of an ingest or a walk takes. `targets` is what our own fetches
    may reach; None when a gateway elsewhere fetches. `has_gateway_key` when that gateway is called
    with a key of the operator's, not of its callers. `webhooks` is what our deliveries may reach.
    `knows_costs` when the gateway has prices in money. No body is shown, nor kept by a bucket, for
    longer than `body_days`, and no row of a run for longer than `row_days` after its results
    expired. `pace` is what the engine asks for. `lines` are whole but where their worth is
    measured. A stop is complete `unseen_s` after its request at the earliest: a worker that has
    lost the service which counts leases needs so long to notice the stop by itself, and nobody
    sees the leases that it holds meanwhile.
    """

    sync_tasks_max: int = limits.SYNC_TASKS_MAX
    at_once_max: int = limits.INLINE_TASKS_MAX
    chunk_tasks: int = field(default_factory=lambda: limits.CHUNK_TASKS)
    shard_count: int = limits.TASK_SHARD_COUNT
    max_inflight: int = limits.MAX_INFLIGHT
    targets: TargetPolicy | None = field(default_factory=TargetPolicy)
    has_gateway_key: bool = False
    webhooks: TargetPolicy = field(default_factory=TargetPolicy)
    teardown_s: float = 5.0
    unseen_s: float = 0.0
    knows_costs: bool = True
    body_days: int = limits.BODY_DAYS
    row_days: int = limits.ROW_DAYS
    pace: BatchingConfig = BatchingConfig()
    cadence: PollIntervals = PollIntervals()
    backpressure: Backpressure = field(default_factory=Backpressure)
    quotas: Quotas = field(default_factory=Quotas)

    def path_for(self, tasks_count: int) -> AdmissionMode:
        return choose_path(tasks_count, at_once_max=self.at_once_max, sync_max=self.sync_tasks_max)


class InlineExecutor:
    """Work done on the spot: for worlds without threads."""

    async def run(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports, the randomness (secrets are drawn from it too) and the name of this process
    start. `cache` where looking costs less than reading. `is_apart` while leases are not agreed
    upon with others, as nobody can be asked."""

    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator
    clock: Clock
    secret_box: SecretBox
    signals: Signals
    random: Random
    process_id: str
    policy: RuntimeConfig = field(default_factory=RuntimeConfig)
    news: EventWakeups = field(default_factory=EventWakeups)
    executor: Executor = field(default_factory=InlineExecutor)
    workflows: WorkflowCallback | None = None
    cache: Cache | None = None
    is_apart: Callable[[], bool] = lambda: False
    minter: ids.Minter = field(default_factory=ids.Minter)

    def now(self) -> float:
        return self.clock.now()

    def new_id(self) -> str:
        return self.minter.mint(self.clock.now(), self.random)

    async def commit(self, change: Change) -> Verdict:
        """Applies a change; events that it tells of are given their places behind it."""
        (verdict,) = await self.store.commit((change,))
        if isinstance(verdict, Applied):
            await event_log.number_committed(self.store, self.news, change)
        return verdict
