"""The supervision tree of a worker, as data (docs/architecture.md, The worker).

Start order is dependency order; stop order is its reverse. The strategy is REST_FOR_ONE: when an
actor crashes, the actors that were started after it may depend on it, so they are stopped and
started again with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from actors.completion_notifier import CompletionNotifier
from actors.crawler import Crawler
from actors.exporter import Exporter
from actors.ingest_streamer import IngestStreamer
from actors.lease_heartbeater import LeaseHeartbeater
from actors.limiters.call_limiter import CallLimiter
from actors.limiters.fair_limiter import FairLimiter
from actors.limiters.storage_breaker import StorageBreaker
from actors.messages import (
    BatchOpened,
    DiscoveryMessage,
    HeartbeaterMessage,
    PollerMessage,
    RunChanged,
    ShardWriterMessage,
    StreamerMessage,
    TearDown,
)
from actors.poller.poller import RunPoller
from actors.queue_discovery import POLLER_GRACE_S, QueueDiscovery
from actors.reconcile_sweeper import ReconcileSweeper
from actors.runtime import (
    Address,
    AskTimedOut,
    Child,
    DynamicSupervisor,
    Mailbox,
    MailboxFull,
    OnExhausted,
    Policy,
    Strategy,
    Supervisor,
    nest,
)
from actors.scheduler import Scheduler
from actors.shard_writer import ShardWriter
from actors.status_reporter import StatusReporter, WaitStatus
from actors.task_runner import TaskRunner
from actors.worker_roster import Roster, WorkerRoster
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Job, Run
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.gateway import Gateway
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.telemetry import ActorFigures, Metrics
from conveyor.usecases.context import BatchingConfig, Context

# The name under which the metrics add up the pollers of all runs.
POLLERS = "pollers"

# Shard writers per worker of the embedded engine. While one waits for its commit, the others
# gather.
WRITERS_COUNT = 4


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """The mailboxes of one worker. They are created before the actors, so that each actor can be
    given the addresses of the others. They outlive the actors, so unread messages survive a
    restart.

    Each capacity bounds the memory of a backlog. A sender finds a full mailbox by waiting or by
    MailboxFull.
    """

    # The largest: each running task has a Hold and a Release, and a full mailbox delays the tasks.
    heartbeater: Mailbox[HeartbeaterMessage] = field(
        default_factory=lambda: Mailbox(capacity=10_000)
    )
    discovery: Mailbox[DiscoveryMessage] = field(default_factory=lambda: Mailbox(capacity=1_000))
    streamer: Mailbox[StreamerMessage] = field(default_factory=lambda: Mailbox(capacity=1_000))
    writers: Sequence[Mailbox[ShardWriterMessage]] = field(
        default_factory=lambda: [Mailbox(capacity=1_000) for _ in range(WRITERS_COUNT)]
    )


def single_writer_mailboxes() -> Mailboxes:
    """Mailboxes with one writer, for an engine that writes many shards in one call. Tasks of all
    shards that are settled together are then also acked together."""
    return Mailboxes(writers=[Mailbox(capacity=WRITERS_COUNT * 1_000)])


@dataclass(frozen=True, slots=True)
class LocalSignals:
    """Signals to the worker in this process: messages to its discovery and its ingest streamer."""

    discovery: Address[DiscoveryMessage]
    streamer: Address[StreamerMessage]

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        # A dropped signal only costs time: the next scan of discovery finds the change.
        with suppress(MailboxFull):
            self.discovery.tell_nowait(RunChanged(job_id, run_id, tasks))

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        # The sweeper finds a batch that has not moved.
        with suppress(MailboxFull):
            self.streamer.tell_nowait(BatchOpened(job_id, run_id))

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        try:
            return await self.discovery.ask(
                lambda reply: TearDown(job_id, run_id, reply), deadline_s=deadline_s
            )
        except AskTimedOut:
            return TeardownResult(complete=False)


def worker_tree(
    env: Context,
    mail: Mailboxes,
    *,
    gateway: Gateway,
    notifier: WebhookSender,
    limiter: FairLimiter,
    metrics: Metrics,
    also: Sequence[Child] = (),
) -> Supervisor:
    """Builds a whole worker. The children in `also` start last and stop first, such as the HTTP
    server of a dev process."""
    intervals = env.config.cadence
    roster = _make_roster(env, limiter)
    completion_notifier = CompletionNotifier(
        env=env, notifier=notifier, roster=roster, period_s=intervals.notices_s, metrics=metrics
    )
    sweeper = ReconcileSweeper(
        env=env,
        roster=roster,
        streamer=mail.streamer.address,
        period_s=intervals.sweeps_s,
        deletion_period_s=intervals.deletions_s,
        batch_idle_s=intervals.stalled_s,
    )
    return Supervisor(
        # The order matters: a crash also restarts all later children. The sweeper sends to the
        # ingest streamer, so it comes after it.
        "worker",
        strategy=Strategy.REST_FOR_ONE,
        children=[
            *fetch_children(
                env, mail, gateway=gateway, limiter=limiter, metrics=metrics, roster=roster
            ),
            Child(
                "ingest_streamer",
                run=IngestStreamer(env=env, metrics=metrics).run,
                mailbox=mail.streamer,
            ),
            Child(
                "scheduler",
                run=Scheduler(env=env, roster=roster, period_s=intervals.schedules_s).run,
            ),
            Child("completion_notifier", run=completion_notifier.run),
            Child(
                "exporter",
                run=Exporter(
                    env=env, roster=roster, metrics=metrics, period_s=intervals.exports_s
                ).run,
            ),
            *_crawlers(env, roster),
            Child("reconcile_sweeper", run=sweeper.run),
            *also,
        ],
    )


def helper_tree(
    env: Context,
    mail: Mailboxes,
    *,
    gateway: Gateway,
    limiter: FairLimiter,
    metrics: Metrics,
) -> Supervisor:
    """Builds a worker that only fetches, beside the process that owns the data. No signal reaches
    it, so its discovery scans more often: this interval is how soon it notices a stop."""
    return Supervisor(
        "helper",
        strategy=Strategy.REST_FOR_ONE,
        children=fetch_children(
            env,
            mail,
            gateway=gateway,
            limiter=limiter,
            metrics=metrics,
            roster=_make_roster(env, limiter),
            discover_s=env.config.cadence.helper_discover_s,
        ),
    )


# The children that fetch, in start order. The heartbeater comes first: when it crashes it forgets
# all holds, so all fetches must restart with it. The supervisor of the pollers comes before
# discovery, which starts pollers as its children. DROP: a run whose poller crashes again and again
# must not stop the pollers of other runs. TRANSIENT: a poller that returns has ended its run, so
# only a crash starts it again.
def fetch_children(
    env: Context,
    mail: Mailboxes,
    *,
    gateway: Gateway,
    limiter: FairLimiter,
    metrics: Metrics,
    roster: Roster,
    discover_s: float | None = None,
) -> list[Child]:
    wait_status = WaitStatus()
    storage = StorageBreaker(env.random)
    _watch(metrics, limiter, storage)
    runner = TaskRunner(
        env=env,
        gateway=gateway,
        heartbeater=mail.heartbeater.address,
        writers=[mailbox.address for mailbox in mail.writers],
        metrics=metrics,
        storage=storage,
        wait_status=wait_status,
    )
    # Only a remote gateway has a limit and outages of its own. For direct fetches there is no call
    # limiter.
    calls = CallLimiter(env, metrics) if env.config.targets is None else None
    pollers = DynamicSupervisor("runs", stop_grace_s=POLLER_GRACE_S, exhaustion=OnExhausted.DROP)

    def make_poller(job: Job, run: Run, mailbox: Mailbox[PollerMessage]) -> Child:
        poller = RunPoller(
            env=env,
            job=job,
            run_at_start=run,
            limiter=limiter,
            run_task=runner.run,
            price=gateway.price,
            metrics=metrics,
            storage=storage,
            wait_status=wait_status,
            calls=calls,
        )
        return Child(
            run.run_id,
            run=poller.run,
            restart=Policy.TRANSIENT,
            stop_grace_s=POLLER_GRACE_S,
            mailbox=mailbox,
        )

    heartbeater = LeaseHeartbeater(env=env, metrics=metrics)
    writer = ShardWriter(env=env, metrics=metrics, is_urgent=lambda: limiter.is_settling_urgent)
    discovery = QueueDiscovery(
        env=env,
        roster=roster,
        pollers=pollers,
        make_poller=make_poller,
        delta_s=discover_s or env.config.cadence.discover_s,
    )
    return [
        Child("lease_heartbeater", run=heartbeater.run, mailbox=mail.heartbeater),
        *(
            Child(f"shard_writer_{number}", run=writer.run, mailbox=mailbox)
            for number, mailbox in enumerate(mail.writers)
        ),
        *([] if calls is None else [Child("call_limiter", run=calls.run)]),
        nest(pollers),
        Child("queue_discovery", run=discovery.run, mailbox=mail.discovery),
        # Late, because a crash of it must not restart the fetches.
        Child("worker_roster", run=WorkerRoster(env=env, limiter=limiter, roster=roster).run),
        Child("status_reporter", run=StatusReporter(env=env, wait_status=wait_status).run),
    ]


def _crawlers(env: Context, roster: Roster) -> list[Child]:
    period_s = env.config.cadence.crawls_s
    if period_s is None:
        return []
    return [Child("crawler", run=Crawler(env=env, roster=roster, period_s=period_s).run)]


def actor_figures(supervisor: Supervisor) -> Iterator[ActorFigures]:
    """Returns the figures of every actor. Pollers come and go with their runs, so they are added
    up: a label for each run would grow without bound."""
    for record in supervisor.records():
        child = record.child
        nested = child.supervisor
        if nested is None:
            mail = None if child.mailbox is None else child.mailbox.statistics()
            yield ActorFigures(
                child.name,
                record.restart_count,
                None if mail is None else mail.depth,
                None if mail is None else mail.capacity,
            )
        elif isinstance(nested, DynamicSupervisor):
            boxes = [poller.child.mailbox for poller in nested.records()]
            mails = [box.statistics() for box in boxes if box is not None]
            yield ActorFigures(
                POLLERS,
                nested.restart_count,
                sum(mail.depth for mail in mails),
                sum(mail.capacity for mail in mails),
            )
        elif isinstance(nested, Supervisor):
            yield from actor_figures(nested)


def make_limiter(capacity: int, pace: BatchingConfig) -> FairLimiter:
    """Makes the slots of a process that works on `capacity` tasks of one caller."""
    return FairLimiter(capacity=capacity, writing_max=pace.writing_share * capacity)


def _make_roster(env: Context, limiter: FairLimiter) -> Roster:
    return Roster(env.process_id, slots=limiter.capacity, is_shared=env.config.shares_runs)


def _watch(metrics: Metrics, limiter: FairLimiter, storage: StorageBreaker) -> None:
    """Lets each scrape read the current state of what limits fetches."""
    metrics.inflight.set_function(lambda: limiter.inflight_count)
    metrics.slots.total.set_function(lambda: limiter.slots_count)
    metrics.slots.usable.set_function(lambda: limiter.usable_count)
    # From 0 on, so that a rate sees the first failure.
    for outcome in ("delivered", "failed"):
        metrics.webhook_deliveries.labels(outcome)
    metrics.storage.away.set_function(lambda: storage.is_open)
    metrics.storage.pages_held.set_function(lambda: storage.held_count)
