"""Who supervises whom, as data; start order is dependency order, stop order its reverse (SPEC 6).

REST_FOR_ONE: when one crashes, everything that was started after it, and so may lean on it, is
stopped and started again with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from actors.board import WaitBoard
from actors.completion_notifier import CompletionNotifier
from actors.exporter import Exporter
from actors.gate import FairGate
from actors.ingest_streamer import IngestStreamer
from actors.lease_heartbeater import LeaseHeartbeater
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
from actors.queue_discovery import DELTA_S, POLLER_GRACE_S, QueueDiscovery
from actors.reconcile_sweeper import ReconcileSweeper
from actors.run_poller import RECEIVE_MAX, RunPoller
from actors.runtime import (
    Address,
    Child,
    DynamicSupervisor,
    Exhaustion,
    Mailbox,
    MailboxFull,
    NoAnswer,
    Policy,
    Strategy,
    Supervisor,
    nest,
)
from actors.scheduler import Scheduler
from actors.shard_writer import ShardWriter
from actors.task_runner import TaskRunner
from actors.wait_reporter import WaitReporter
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Job, Run
from conveyor.ports.gateway import Gateway
from conveyor.ports.notifier import Notifier
from conveyor.ports.signals import Receipt
from conveyor.telemetry import Metrics
from conveyor.usecases.env import Env

WRITERS_COUNT = 4
HELPER_DELTA_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the actors of a worker look by themselves, in seconds, and how much a poller
    receives at a time."""

    discover_s: float = DELTA_S
    sweep_s: float = 15.0
    scrub_s: float = 2.0
    stalled_s: float = 30.0
    schedule_s: float = 1.0
    notify_s: float = 1.0
    export_s: float = 0.5
    receive_max: int = RECEIVE_MAX


USUAL = Pace()
HELPERS = Pace(discover_s=HELPER_DELTA_S)


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """The mail of one worker; made before its actors, so that everybody can be given addresses."""

    heartbeater: Mailbox[HeartbeaterMessage] = field(
        default_factory=lambda: Mailbox(capacity=10_000)
    )
    discovery: Mailbox[DiscoveryMessage] = field(default_factory=lambda: Mailbox(capacity=1_000))
    streamer: Mailbox[StreamerMessage] = field(default_factory=lambda: Mailbox(capacity=1_000))
    writers: Sequence[Mailbox[ShardWriterMessage]] = field(
        default_factory=lambda: [Mailbox(capacity=1_000) for _ in range(WRITERS_COUNT)]
    )


@dataclass(frozen=True, slots=True)
class LocalSignals:
    """Signals for the worker in this process: mail to its discovery and its ingest streamer."""

    discovery: Address[DiscoveryMessage]
    streamer: Address[StreamerMessage]

    async def run_changed(self, job_id: JobId, run_id: RunId) -> None:
        with suppress(MailboxFull):  # Discovery finds out by itself within seconds.
            self.discovery.tell_nowait(RunChanged(job_id, run_id))

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        with suppress(MailboxFull):  # The sweeper brings it.
            self.streamer.tell_nowait(BatchOpened(job_id, run_id))

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> Receipt:
        try:
            return await self.discovery.ask(
                lambda reply: TearDown(job_id, run_id, reply), deadline_s=deadline_s
            )
        except NoAnswer:
            return Receipt(complete=False)


def worker_tree(  # noqa: PLR0913 (what a worker is made of)
    env: Env,
    mail: Mailboxes,
    *,
    gateway: Gateway,
    notifier: Notifier,
    gate: FairGate,
    metrics: Metrics,
    also: Sequence[Child] = (),
    pace: Pace = USUAL,
) -> Supervisor:
    """A whole worker; `also` starts last and stops first (the HTTP server of a dev process)."""
    return Supervisor(
        "worker",
        strategy=Strategy.REST_FOR_ONE,
        children=[
            *_fetching(env, mail, gateway=gateway, gate=gate, metrics=metrics, pace=pace),
            Child("ingest_streamer", run=IngestStreamer(env=env).run, mailbox=mail.streamer),
            Child("scheduler", run=Scheduler(env=env, period_s=pace.schedule_s).run),
            Child(
                "completion_notifier",
                run=CompletionNotifier(env=env, notifier=notifier, period_s=pace.notify_s).run,
            ),
            Child("exporter", run=Exporter(env=env, period_s=pace.export_s).run),
            Child(
                "reconcile_sweeper",
                run=ReconcileSweeper(
                    env=env,
                    streamer=mail.streamer.address,
                    period_s=pace.sweep_s,
                    scrub_period_s=pace.scrub_s,
                    batch_idle_s=pace.stalled_s,
                ).run,
            ),
            *also,
        ],
    )


def helper_tree(
    env: Env,
    mail: Mailboxes,
    *,
    gateway: Gateway,
    gate: FairGate,
    metrics: Metrics,
    pace: Pace = HELPERS,
) -> Supervisor:
    """A worker that only fetches, beside the one that owns the data. No signal reaches it, so its
    discovery looks more often: that is how soon it hears of a stop."""
    return Supervisor(
        "helper",
        strategy=Strategy.REST_FOR_ONE,
        children=_fetching(env, mail, gateway=gateway, gate=gate, metrics=metrics, pace=pace),
    )


def _fetching(
    env: Env,
    mail: Mailboxes,
    *,
    gateway: Gateway,
    gate: FairGate,
    metrics: Metrics,
    pace: Pace,
) -> list[Child]:
    metrics.inflight.set_function(lambda: gate.inflight_count)
    board = WaitBoard()
    runner = TaskRunner(
        env=env,
        gateway=gateway,
        heartbeater=mail.heartbeater.address,
        writers=[mailbox.address for mailbox in mail.writers],
        metrics=metrics,
        board=board,
    )
    pollers = DynamicSupervisor("runs", stop_grace_s=POLLER_GRACE_S, exhaustion=Exhaustion.DROP)

    def make_poller(job: Job, run: Run, mailbox: Mailbox[PollerMessage]) -> Child:
        poller = RunPoller(
            env=env,
            job=job,
            run_at_start=run,
            gate=gate,
            run_task=runner.run,
            price=gateway.price,
            metrics=metrics,
            board=board,
            receive_max=pace.receive_max,
        )
        return Child(
            run.run_id,
            run=poller.run,
            restart=Policy.TRANSIENT,
            stop_grace_s=POLLER_GRACE_S,
            mailbox=mailbox,
        )

    writer = ShardWriter(env=env, metrics=metrics)
    discovery = QueueDiscovery(
        env=env, pollers=pollers, make_poller=make_poller, delta_s=pace.discover_s
    )
    return [
        Child("lease_heartbeater", run=LeaseHeartbeater(env=env).run, mailbox=mail.heartbeater),
        *(
            Child(f"shard_writer_{number}", run=writer.run, mailbox=mailbox)
            for number, mailbox in enumerate(mail.writers)
        ),
        nest(pollers),
        Child("queue_discovery", run=discovery.run, mailbox=mail.discovery),
        Child("wait_reporter", run=WaitReporter(env=env, board=board, gate=gate).run),
    ]
