"""Context: everything that a use case needs from outside, in one value.

The composition root, the tests and the simulator each build one. A use case reads no setting, clock
or random number from anywhere else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import outcome
import trio

from conveyor.domain import ids, limits
from conveyor.domain.changes import Applied, Change, Verdict
from conveyor.domain.errors import Conflict
from conveyor.domain.event_log import events_in
from conveyor.domain.ids import CallerId, Random
from conveyor.domain.model import Job, Run
from conveyor.domain.quota import DEFAULTS, Quotas
from conveyor.domain.submit.admission import AdmissionMode, choose_path
from conveyor.domain.submit.scraper_params import REMOTE_SUPPORT, GatewaySupport
from conveyor.domain.submit.target import TargetPolicy
from conveyor.ports.blobs import Blobs
from conveyor.ports.cache import Cache
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator, Signals
from conveyor.ports.executor import Executor
from conveyor.ports.export_sink import ExportSink
from conveyor.ports.queue import Queue
from conveyor.ports.secret_box import SecretBox
from conveyor.ports.store import Store
from conveyor.ports.tracer import Tracer
from conveyor.ports.webhook_sender import WorkflowCallback
from conveyor.usecases import event_log, tracing
from conveyor.usecases.event_log import EventWakeups

T = TypeVar("T")

# About 1 KB each. A forgotten run costs one more round trip.
_SEEN_RUNS_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """How long operations wait to form a batch. Engines with a price per call wait longer (decision
    0012).

    A group of settles is written after `settle_s`, or when it has `settle_max` settles. A poller
    waits for `receive_share` of a task's duration, or until there is room for a full receive, and
    receives up to `receive_max` messages. With `counts_together` a process counts the tasks that it
    ends on one counter row of their run, where every row that a group writes has a price. Of the
    tasks that have ended, `writing_share` times as many as there are slots may wait to be written.
    """

    settle_s: float = 0.01
    settle_max: int = limits.INLINE_TASKS_MAX
    receive_share: float = 0.0
    receive_max: int = 50
    counts_together: bool = False
    writing_share: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """Seconds between two queries for due work, for the cases in which no signal arrives.

    A batch that has not moved for `stalled_s` has lost its ingester.
    """

    # How late a worker finds a new run if the signal was lost.
    discover_s: float = 10.0
    # No signal reaches a helper process, so this is how soon it finds a new run or a stop.
    helper_discover_s: float = 0.25
    notices_s: float = 1.0
    schedules_s: float = 1.0
    exports_s: float = 0.5
    # None where no crawls are expected: then none is advanced.
    crawls_s: float | None = 0.2
    deletions_s: float = 2.0
    sweeps_s: float = 15.0
    stalled_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The values that an operator may tune. A value that must not change for existing jobs is
    pinned on their rows.

    `at_once_max` is how many tasks the engine takes in one transaction with their job.
    `chunk_tasks` is how many tasks one step of an ingest or of a page walk takes. A page reads at
    most `rows_read_max` rows, and an audit at most `audit_bodies_max` bodies. `targets` limits what
    direct fetches may reach; it is None if a remote gateway fetches. `gateway` says which scraper
    parameters the gateway honours. `has_gateway_key` is True
    if that gateway is called with the operator's key instead of the callers' keys. `webhooks`
    limits what deliveries may reach. `knows_costs` is True if the gateway has prices in money.

    No body is kept or shown for longer than `body_days`. No row of a run is kept for longer than
    `row_days` after its results expired. `pace` is chosen for the engine.

    A stop is complete `unseen_s` after its request at the earliest. A worker that cannot reach the
    service that counts leases needs that long to notice the stop from the run's row, and its leases
    are not visible meanwhile. `build` names the build of the program in `/healthz`.
    """

    sync_tasks_max: int = limits.SYNC_TASKS_MAX
    at_once_max: int = limits.INLINE_TASKS_MAX
    chunk_tasks: int = limits.CHUNK_TASKS
    rows_read_max: int = limits.ROWS_READ_MAX
    audit_bodies_max: int = limits.AUDIT_BODIES_MAX
    shard_count: int = limits.TASK_SHARD_COUNT
    max_inflight: int = limits.MAX_INFLIGHT
    targets: TargetPolicy | None = field(default_factory=TargetPolicy)
    gateway: GatewaySupport = REMOTE_SUPPORT
    has_gateway_key: bool = False
    webhooks: TargetPolicy = field(default_factory=TargetPolicy)
    # How long a stop or a deletion waits for work to end before it responds. The same as
    # POLLER_GRACE_S (actors/queue_discovery.py).
    teardown_s: float = 5.0
    unseen_s: float = 0.0
    knows_costs: bool = True
    body_days: int = limits.BODY_DAYS
    row_days: int = limits.ROW_DAYS
    pace: BatchingConfig = BatchingConfig()
    cadence: PollIntervals = PollIntervals()
    quotas: Quotas = field(default_factory=lambda: DEFAULTS)
    build: str = "unknown"
    # The series of a run has a bucket for so many ended tasks or more.
    sample_tasks_min: int = 1
    # Each run is polled by as many workers as it needs. Only where each poll is billed.
    shares_runs: bool = False
    # Costs a few reads for each live run and sweep, so only where workers are scaled by it.
    measures_demand: bool = False

    def path_for(self, tasks_count: int) -> AdmissionMode:
        return choose_path(tasks_count, at_once_max=self.at_once_max, sync_max=self.sync_tasks_max)


@dataclass(slots=True)
class SeenRuns:
    """The latest runs of jobs as they were read last. Most of them are still the same, so the next
    request reads what belongs to them without waiting for the job's row."""

    _runs: dict[tuple[CallerId, str], Run] = field(default_factory=dict)

    def find(self, caller: CallerId, job_id: str) -> Run | None:
        return self._runs.get((caller, job_id))

    def note(self, job: Job, run: Run | None) -> None:
        self.forget(job.caller, job.job_id)
        if run is not None:
            if len(self._runs) >= _SEEN_RUNS_MAX:
                del self._runs[next(iter(self._runs))]
            self._runs[job.caller, job.job_id] = run

    def forget(self, caller: CallerId, job_id: str) -> None:
        self._runs.pop((caller, job_id), None)


class InlineExecutor:
    """Runs work in the calling task, for tests and the simulator, which have no threads."""

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        # A thread executor always has a checkpoint, so this one has one too.
        await trio.lowlevel.checkpoint()
        return work(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports, the randomness (also the source of secrets) and the id of this process start.

    `cache` is None if reading counters from the store costs no more than a cache. `is_apart`
    returns True while the shared coordinator is unavailable and leases are not agreed upon with
    other processes.
    """

    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator
    clock: Clock
    secret_box: SecretBox
    signals: Signals
    random: Random
    process_id: str
    config: RuntimeConfig = field(default_factory=RuntimeConfig)
    # Wakes event streams of this process only.
    news: EventWakeups = field(default_factory=EventWakeups)
    executor: Executor = field(default_factory=InlineExecutor)
    workflows: WorkflowCallback | None = None
    # None in a process that makes no exports.
    export_sink: ExportSink | None = None
    cache: Cache | None = None
    # None unless the operator exports traces.
    tracer: Tracer | None = None
    is_apart: Callable[[], bool] = lambda: False
    seen_runs: SeenRuns = field(default_factory=SeenRuns)
    # One per process: it keeps ids increasing even if the clock is set back.
    minter: ids.Minter = field(default_factory=ids.Minter)

    def now(self) -> float:
        return self.clock.now()

    def new_id(self) -> str:
        return self.minter.mint(self.clock.now(), self.random)

    async def commit(self, change: Change) -> Verdict:
        """Applies one change that reports no event."""
        assert not events_in(change), "its events would have no number: use commit_with_events"
        (verdict,) = await self.store.commit((change,))
        return verdict

    async def commit_with_events(self, change: Change) -> Verdict:
        """Applies one change. If it was applied, a second commit numbers the events in it."""
        (verdict,) = await self.store.commit((change,))
        if isinstance(verdict, Applied):
            # In a commit of its own, so that the changes of one caller do not conflict on the row
            # that numbers its events. The sweeper numbers the events if this process stops here.
            if self.tracer is not None:
                tracing.record_events(self.tracer, events_in(change))
            await event_log.number_committed(self.store, self.news, change)
        return verdict


Read = Callable[[], Awaitable[Any]]


async def together(*reads: Read) -> list[Any]:
    """Makes reads at the same time, which takes as long as the longest of them. Raises the first
    error in their order."""
    results: list[outcome.Outcome[Any] | None] = [None] * len(reads)

    async def make(number: int) -> None:
        results[number] = await outcome.acapture(reads[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(reads)):
            nursery.start_soon(make, number)
    return [result.unwrap() for result in results if result is not None]


# Optimistic retry: read, decide, commit, and start again if another writer was faster
# (docs/engines.md, Changes and guards). A failed guard only shows that the rows have changed, so
# each attempt starts with its first read. There is no pause between attempts: if one fails, another
# writer has made progress.

# Ends the loop for a guard that can never hold, and for a row that many writers change all the
# time.
ATTEMPTS_MAX = 50


class Again(Enum):
    """The result of an attempt that must be repeated: its rows were changed by another writer, or
    the attempt has changed them itself and must read the new rows."""

    AGAIN = "again"


AGAIN = Again.AGAIN

Attempt = Callable[[], Awaitable[T | Again]]


async def retry(attempt: Attempt[T]) -> T | Again:
    """Returns the first result of an attempt, or AGAIN if no attempt has one."""
    for _ in range(ATTEMPTS_MAX):
        result = await attempt()
        if not isinstance(result, Again):
            return result
    return AGAIN


async def retry_or_refuse(subject: str, attempt: Attempt[T]) -> T:
    """Like `retry`, for a caller's request: raises Conflict if no attempt has a result. `subject`
    begins the sentence: "The run is"."""
    result = await retry(attempt)
    if isinstance(result, Again):
        raise Conflict(f"{subject} changing too fast; try again.", retry_after_s=1)
    return result
