"""A simulated process: runs the real program as an API or a worker, and starts it again when it
ends.

It differs from a real process in four ways: faults are injected into its engine calls, the internet
is a model, the wall clock may be wrong, and requests arrive as ASGI events without a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio
from prometheus_client import CollectorRegistry

from actors.cross_process_signals import CrossProcessSignals
from actors.limiters.fair_limiter import FairLimiter
from actors.tree import LocalSignals, Mailboxes
from conveyor.bootstrap.runtime import Runtime, make_env
from conveyor.config import Settings
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.quota import DEFAULTS, Quota, Quotas
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.direct import DirectGateway
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.engines.http.zenrows import ZenrowsGateway
from conveyor.ports.coordinator import Signals
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Gateway
from conveyor.simulation.backends.backends import Ports
from conveyor.simulation.context import SimContext
from conveyor.simulation.environment.fake_internet import GATEWAY_HOST, FakeInternet
from conveyor.simulation.environment.http_exchange import HOST, Exchange
from conveyor.simulation.environment.recording_gateway import RecordingGateway
from conveyor.simulation.faults.fault_injector import FaultInjector, InjectedCrash, Killed
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.faults.skewed_clock import WallClock
from conveyor.simulation.options import Options
from conveyor.simulation.secret_markers import secret_of
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import Context, InlineExecutor, PollIntervals

if TYPE_CHECKING:
    from quart_trio import QuartTrio

    from conveyor.bootstrap.aws import AwsRuntime

# The program promises to end within 110 s of SIGTERM (deploy/); after that the process is killed.
STOP_S = 110.0
# How long an ending process waits for its requests.
REQUESTS_GRACE_S = 10.0
# The probability that a signal from another process arrives.
SIGNAL_DELIVERED_RATE = 0.8
CALM_RESTART_DELAY_S = 0.1
"""Virtual time must pass before a process that cannot start is started again."""

_SERVES = frozenset({"api", "dev"})
_WORKS = frozenset({"worker", "dev"})


@dataclass(slots=True, kw_only=True)
class Process:
    """One process of the world, over all its restarts. While `restart_gate` is an event that is not
    set, the process does not start again."""

    name: str
    role: str
    sim: SimContext
    clock: WallClock
    random: Random = field(init=False)
    injector: FaultInjector | None = None
    mail: Mailboxes | None = None
    restart_gate: trio.Event | None = None
    _app: QuartTrio | None = None
    _nursery: trio.Nursery | None = None
    _stop: trio.Event = field(default_factory=trio.Event)
    _exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = self.sim.random(self.name)

    @property
    def is_serving(self) -> bool:
        """Whether the process accepts connections. A process that is about to end accepts none."""
        nursery = self._nursery
        if self._app is None or nursery is None or self.injector is None:
            return False
        is_ending = self.injector.is_dead or nursery.cancel_scope.cancel_called
        return not (is_ending or self._stop.is_set())

    @property
    def works(self) -> bool:
        return self.role in _WORKS

    async def run(self) -> None:
        """Runs the program again and again, with a pause after each end."""
        while True:
            while not self._may_start():
                await trio.sleep(1.0)
            await self._run_once()
            await trio.sleep(
                CALM_RESTART_DELAY_S if self.sim.faults.is_calm else self._restart_delay_s()
            )
            if self.restart_gate is not None:
                await self.restart_gate.wait()

    def kill(self) -> None:
        if self.injector is not None:
            self.injector.kill(Fault.KILLED_BEFORE)

    def terminate(self) -> None:
        """Does what SIGTERM does. `_end_on_signal` kills the process if it takes too long."""
        if self.injector is not None and not self._stop.is_set():
            self.sim.trace.note(self.name, "asked to stop")
            self._stop.set()

    def accept(self, exchange: Exchange) -> bool:
        """Gives the request to the program; returns False if the process accepts no connection."""
        if not self.is_serving or self._nursery is None:
            return False
        self._exchanges.append(exchange)
        self._nursery.start_soon(self._serve, exchange)
        return True

    def _may_start(self) -> bool:
        """Whether the process may start now.

        A helper starts once the owner of the data directory serves. The owner starts when all
        processes of its last start have ended: a real owner blocks on their file locks, and nothing
        may block here.
        """
        if self.role == "helper":
            return self.sim.processes[0].is_serving
        if self.role == "dev":
            return all(process.injector is None for process in self.sim.processes)
        return True

    def _restart_delay_s(self) -> float:
        return self.random.choice((0.0, self.random.uniform(0.0, 5.0), self.random.uniform(0, 60)))

    async def _run_once(self) -> None:
        sim = self.sim
        self._stop = trio.Event()
        injector = self.injector = FaultInjector(
            name=self.name,
            trace=sim.trace,
            faults=sim.faults,
            random=self.random,
            latency_s=sim.options.latency_s,
            monitor=sim.monitor,
        )
        sim.trace.note(self.name, "started", self.role)
        try:
            with injector.scope:
                mail = self.mail = Mailboxes()
                async with sim.backend.open(
                    injector, self.clock, self.random, role=self.role, mail=mail
                ) as ports:
                    # Opening an engine may release what killed processes held; compare before the
                    # program writes.
                    sim.monitor.check_snapshot()
                    await self._run_until_stopped(self._make_runtime(injector, ports, mail))
        except* Killed:
            pass
        except* Exception as errors:  # noqa: BLE001 (an error ends the process, not the world)
            expected = InjectedCrash if self._app is not None else (InjectedCrash, Unavailable)
            if errors.split(expected)[1] is None:
                sim.trace.note(self.name, "gave up", _describe_errors(errors))
            elif not injector.is_dead:
                sim.report_crash(self.name, _describe_errors(errors))
        finally:
            self.injector = self._app = self._nursery = self.mail = None
            for exchange in self._exchanges:
                exchange.is_over.set()
            self._exchanges.clear()
            sim.trace.note(self.name, "ended")
            self._stop_helpers()

    def _stop_helpers(self) -> None:
        """Stops the helper processes: their owner, which ended, closed the database that they
        share."""
        if self.role == "dev":
            for process in self.sim.processes:
                if process.role == "helper":
                    process.terminate()

    async def _run_until_stopped(self, runtime: Runtime) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            work = trio.CancelScope()
            nursery.start_soon(self._end_on_signal, work, nursery)
            if self.role in _SERVES:
                self._app = runtime.app(ready=lambda: True)
            try:
                with work:
                    await self._run_role(runtime)
                await self._finish_requests()
            finally:
                self._nursery = None  # No client may connect while the process closes.
            nursery.cancel_scope.cancel()

    async def _run_role(self, runtime: Runtime) -> None:
        if self.role in _WORKS:
            await runtime.worker().run()
        elif self.role == "helper":
            await runtime.helper().run()
        else:
            await trio.sleep_forever()

    async def _end_on_signal(self, work: trio.CancelScope, nursery: trio.Nursery) -> None:
        await self._stop.wait()
        work.cancel(reason="signal")
        await trio.sleep(STOP_S)
        if self.injector is not None:
            self.injector.kill(Fault.TERMINATED)

    async def _finish_requests(self) -> None:
        with trio.move_on_after(REQUESTS_GRACE_S):
            while self._exchanges:
                await self._exchanges[0].is_over.wait()

    async def _serve(self, exchange: Exchange) -> None:
        injector, app = self.injector, self._app
        assert injector is not None
        assert app is not None

        async def send(event: Any) -> None:
            injector.check()
            await exchange.send(event)

        try:
            await app(cast("Any", exchange.scope), cast("Any", exchange.receive), cast("Any", send))
        except Exception as error:  # noqa: BLE001 (a failed request does not end the server)
            # Once an answer has begun, the server can only break it off; that is no crash of the
            # program.
            is_cut_off = exchange.status is not None and _contains_only(error, Unavailable)
            if not injector.is_dead and not is_cut_off:
                self.sim.report_crash(self.name, f"{exchange.method} {exchange.path}: {error!r}")
        finally:
            exchange.is_over.set()
            if exchange in self._exchanges:
                self._exchanges.remove(exchange)

    def _make_runtime(self, injector: FaultInjector, ports: Ports, mail: Mailboxes) -> Runtime:
        sim, options = self.sim, self._release()
        settings = settings_of(options)
        env = make_env(settings, ports, self.clock, self.random, mail, InlineExecutor())
        config = replace(
            env.config,
            at_once_max=0 if options.engine == "mixed" else options.at_once_max,
            chunk_tasks=options.chunk_tasks,
            cadence=_cadence(options),
            shares_runs=not sim.backend.is_one_machine,
            pace=replace(
                env.config.pace,
                receive_max=options.receive_max,
                settle_max=options.settle_max or env.config.pace.settle_max,
            ),
        )
        env = replace(
            env,
            config=config,
            signals=self._signals(env, mail, ports.shared),
            cache=None if ports.shared is None else ports.shared.cache,
            is_apart=env.is_apart if ports.shared is None else ports.shared.is_away,
        )
        internet = FakeInternet(
            injector=injector,
            faults=sim.faults,
            random=self.random,
            think_s=options.think_s,
            history=sim.history,
            monitor=sim.monitor,
            policy=TargetPolicy(),
            gateway=sim.gateway,
        )
        return Runtime(
            settings=settings,
            env=env,
            mail=mail,
            gateway=RecordingGateway(
                self._gateway(internet, env), injector, sim.history, sim.monitor
            ),
            notifier=WebhookNotifier(cast("Any", internet), now=env.now),
            limiter=FairLimiter(capacity=options.concurrency),
            metrics=make_metrics(CollectorRegistry()),
            listeners=() if ports.shared is None else ports.shared.listeners,
        )

    def _release(self) -> Options:
        """Draws the release that this start of the process runs, if the world has two releases."""
        options = self.sim.options
        if not options.next_release or self.random.random() < 0.5:
            return options
        self.sim.faults.count(Fault.RELEASES_MIXED)
        self.sim.trace.note(self.name, "is of another release")
        return msgspec.structs.replace(options, **options.next_release)

    def _gateway(self, internet: FakeInternet, env: Context) -> Gateway:
        pool = cast("Any", internet)
        if self.sim.options.has_gateway:
            return ZenrowsGateway(pool, f"https://{GATEWAY_HOST}/v1/", now=env.now)
        return DirectGateway(pool, now=env.now)

    def _signals(self, env: Context, mail: Mailboxes, shared: AwsRuntime | None) -> Signals:
        if shared is not None:
            return shared.signals if self.works else replace(shared.signals, local=None)
        local = LocalSignals(mail.discovery.address, mail.streamer.address)
        if self.sim.backend.is_one_machine:
            return local
        return CrossProcessSignals(
            coordinator=env.coordinator,
            local=local if self.works else None,
            tell=self._announce_run,
            notify=self._announce_batch,
            can_abandon=self.sim.options.has_gateway,
        )

    def _other_workers(self) -> list[Process]:
        return [
            process
            for process in self.sim.processes
            if process is not self and process.works and process.mail is not None
        ]

    async def _announce_run(self, job_id: JobId, run_id: RunId, tasks: int) -> None:
        """Announces a changed run to the other workers. Signals are only hints, so some get
        lost."""
        await trio.sleep(self.random.uniform(0.0, 0.05))
        for process in self._other_workers():
            if process.mail is not None and self._is_signal_delivered():
                mail = process.mail
                signals = LocalSignals(mail.discovery.address, mail.streamer.address)
                await signals.run_changed(job_id, run_id, tasks)

    def _is_signal_delivered(self) -> bool:
        """Whether a signal arrives. It always does where the time of small jobs is measured: there
        no job may wait for the next scan."""
        return (
            self.sim.options.conditions.measures_fairness
            or self.random.random() < SIGNAL_DELIVERED_RATE
        )

    async def _announce_batch(self, job_id: JobId, run_id: RunId) -> None:
        await trio.sleep(self.random.uniform(0.0, 0.05))
        others = self._other_workers()
        if others and self._is_signal_delivered():
            mail = self.random.choice(others).mail
            assert mail is not None
            await LocalSignals(mail.discovery.address, mail.streamer.address).batch_opened(
                job_id, run_id
            )


def settings_of(options: Options) -> Settings:
    return Settings(
        data_dir=Path("simulated"),
        public_url=f"https://{HOST}",
        gateway_url=f"https://{GATEWAY_HOST}/v1/" if options.has_gateway else "direct",
        table="simulated",
        bucket="simulated",
        secret_key=secret_of("all", "what seals the others"),
        sync_tasks_max=options.sync_tasks_max,
        task_shard_count=options.shard_count,
        max_inflight=options.max_inflight,
        concurrency=options.concurrency,
        quotas=_quotas(options),
    )


def _quotas(options: Options) -> Quotas:
    tight = {Quota(name): limit for name, limit in options.conditions.quotas.items()}
    return {**DEFAULTS, **tight}


def _cadence(options: Options) -> PollIntervals:
    return PollIntervals(
        helper_discover_s=2.0,
        sweeps_s=options.sweep_s,
        deletions_s=options.poll_s,
        schedules_s=options.poll_s,
        notices_s=options.poll_s,
        exports_s=options.poll_s,
        crawls_s=None,
    )


def _contains_only(error: Exception, kind: type[Exception]) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _describe_errors(errors: BaseExceptionGroup[Exception]) -> str:
    """The innermost errors of a group, joined into one line."""
    leaves: list[str] = []
    for error in errors.exceptions:
        nested = isinstance(error, BaseExceptionGroup)
        leaves.append(_describe_errors(error) if nested else repr(error))  # type: ignore[arg-type]
    return "; ".join(leaves)
