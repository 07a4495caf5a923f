"""Runs one seed, from the start of its world to its report (docs/simulator.md, How a world runs).

First faults happen while clients work, and the safety invariants are checked. Then the faults end,
and every run must end within a bounded time.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import trio

from actors.queue_discovery import DELTA_S
from conveyor.api.server.app import OUTAGE_LOGGED
from conveyor.domain import limits
from conveyor.domain.changes import CrossingKey, ScrubKey
from conveyor.domain.lifecycle import EXPORT_UNDONE, RUN_LIVE
from conveyor.domain.model import NoticeStatus, PauseState, Run
from conveyor.ports.errors import Unavailable
from conveyor.simulation import deterministic_trio
from conveyor.simulation.backends.backends import Backend, EmbeddedBackend, MemoryBackend
from conveyor.simulation.checkers import ALL
from conveyor.simulation.checkers.idempotency import KEYS_EXPIRED_S
from conveyor.simulation.client_history import History
from conveyor.simulation.clients import calm, hostile
from conveyor.simulation.clients.actions import act_forever
from conveyor.simulation.clients.client import Client
from conveyor.simulation.clients.retry_unanswered import ask_again
from conveyor.simulation.clients.wind_down import (
    let_everything_end,
    look_at_expired_bodies,
    page_through_everything,
    reuse_an_expired_key,
)
from conveyor.simulation.context import SimContext
from conveyor.simulation.environment.conditions import DAY_S
from conveyor.simulation.environment.gateway import GatewayModel
from conveyor.simulation.faults.fault_injector import InjectedCrash, Killed
from conveyor.simulation.faults.fault_scheduler import FaultScheduler
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.faults.skewed_clock import WallClock
from conveyor.simulation.invariant_monitor import InvariantMonitor, Violation
from conveyor.simulation.options import SWEEP_S, Options
from conveyor.simulation.process import Process
from conveyor.simulation.profiles import HASTY_KEYS, IDLE_S_MAX, SHORT_LISTS, SHORT_LIVES
from conveyor.simulation.swaps import combine, swap_constant
from conveyor.simulation.trace.trace import Line, Trace

# How often the simulator looks whether all runs have ended.
POLL_S = 5.0
# How long clients wait before they close again what they find, and processes are told to end again.
REPEAT_S = 120.0
# How long all clients and processes are absent: longer than every retry delay and deletion pass.
ABSENCE_S = 4 * 3600.0
# How long workers have to remove expired bodies, once they are back.
REMOVAL_S = 900.0
RETURN_AFTER_EXPIRY_SHARE = 0.1
"""The share of worlds in which clients return once more, after idempotency keys have expired."""
# How long the program may take to finish deferred work after everybody has returned.
FINISH_WITHIN_S = 1800.0

_CLIENT_LOOPS = {hostile.NAME: hostile.act_hostile, calm.NAME: calm.submit_small_jobs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one seed. `calls` counts calls to engines, `requests` those of clients.
    `took_s` is CPU time, and the only value here that the seed does not decide."""

    options: Options
    hash: str
    violations: list[Violation] = field(default_factory=list)
    liveness_failures: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    kills: int = 0
    calls: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    took_s: float = 0.0
    lines: list[Line] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        return not (self.violations or self.liveness_failures or self.crashes)


def simulate(options: Options) -> Report:
    """Runs one seed in this process."""
    overrides = [
        swap_constant(f"conveyor.domain.limits:{name}", s) for name, s in options.limits.items()
    ]
    overrides.append(swap_constant("conveyor.domain.timing:IDLE_S_MAX", IDLE_S_MAX))
    with _temporary_directory(options) as data_dir, _capture_logs() as logs, combine(*overrides)():
        return deterministic_trio.run(options.seed, _Simulation(options, data_dir, logs).run)


class _Simulation:
    """One world: it builds the parts, runs the phases and makes the report."""

    def __init__(self, options: Options, data_dir: Path, logs: _Logs) -> None:
        self._options = options
        self._data_dir = data_dir
        self._logs = logs
        self._failures: list[str] = []
        self._over = trio.CancelScope()

    async def run(self) -> Report:
        """Runs all phases of the world."""
        sim = self._make_context()
        self._logs.sim = sim
        await sim.backend.prepare()
        clients = [Client(f"tenant{n}", sim) for n in range(self._options.clients_count)]
        if self._options.conditions.hostile:
            clients.append(Client(hostile.NAME, sim))
        if self._options.conditions.measures_fairness:
            clients.append(Client(calm.NAME, sim))
        scheduler = FaultScheduler(sim)
        with self._over:
            async with trio.open_nursery() as nursery:
                for process in sim.processes:
                    nursery.start_soon(process.run)
                await self._run_with_faults(sim, clients, scheduler)
                await self._run_without_faults(sim, clients)
                nursery.cancel_scope.cancel()
        sim.backend.close()
        return self._report(sim)

    def _make_context(self) -> SimContext:
        options, trace = self._options, Trace()
        has_wrong_clocks = bool(options.step_s or options.conditions.clock_leap_s)
        history = History(
            is_fault_free=options.is_fault_free,
            # Where a clock was wrong, the times in leases cannot be compared with the right time.
            sees_leases=options.check_every == 1 and not has_wrong_clocks,
            workers_count=options.workers_count,
            sweep_s=options.sweep_s,
            scan_s=DELTA_S if options.engine in {"aws", "mixed"} and not options.has_redis else 0.0,
            steps_clocks=options.step_s > 0,
            is_isolated=options.conditions.is_isolated,
            has_gateway=options.has_gateway,
            gateway_lies=options.conditions.gateway_lies,
            has_wrong_clocks=has_wrong_clocks,
            leaps_days=options.conditions.clock_leap_s >= DAY_S,
            quotas=options.conditions.quotas,
        )
        rates = options.rate_of | {Fault.OUT_OF_RESOURCES: options.conditions.shortage_rate}
        faults = Faults(rates, _random_of(options, "faults"))
        backend, clock = self._backend(faults)
        monitor = InvariantMonitor(
            take_snapshot=backend.take_snapshot,
            body=backend.body,
            bodies=backend.bodies,
            checkers=ALL,
            history=history,
            trace=trace,
            check_every=options.check_every,
            calls_max=options.calls_max,
            rows_come_first=backend.rows_come_first,
            stored_items=backend.stored_items,
            queue_depths=backend.queue_depths,
            on_violation=lambda: self._over.cancel(reason="an invariant is broken"),
            on_too_many_calls=self._end_after_too_many_calls,
        )
        sim = SimContext(
            options=options,
            trace=trace,
            faults=faults,
            history=history,
            monitor=monitor,
            backend=backend,
            gateway=GatewayModel(
                plan=options.conditions.gateway_plan,
                lies=options.conditions.gateway_lies,
                random=_random_of(options, "gateway"),
                faults=faults,
                history=history,
            ),
        )
        sim.processes = _processes(sim, clock)
        _count_unusual_options(options, faults)
        return sim

    def _end_after_too_many_calls(self) -> None:
        self._failures.append(f"{self._options.calls_max} calls of engines, and no end in sight")
        self._over.cancel(reason="too many calls")

    def _backend(self, faults: Faults) -> tuple[Backend, WallClock | None]:
        random = _random_of(self._options, "engine")
        if self._options.engine == "embedded":
            clock = WallClock()
            return EmbeddedBackend(
                self._data_dir / "data",
                faults,
                clock,
                random,
                has_power_cuts=self._options.conditions.power_cut_every_s > 0,
            ), clock
        if self._options.engine == "aws":
            from conveyor.simulation.backends.aws import AwsBackend

            return AwsBackend(self._options, faults, random), None
        if self._options.engine == "postgres":
            from conveyor.simulation.backends.postgres import PostgresBackend

            return PostgresBackend(self._options, random), None
        if self._options.engine == "mixed":
            from conveyor.simulation.backends.mixed import MixedBackend

            return MixedBackend(self._options, faults, random), None
        return MemoryBackend(random), None

    async def _run_with_faults(
        self, sim: SimContext, clients: list[Client], scheduler: FaultScheduler
    ) -> None:
        for client in clients:
            if client.name == calm.NAME:
                await calm.submit_alone(client)
        with trio.move_on_after(self._options.safety_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scheduler.run)
                for client in clients:
                    nursery.start_soon(_CLIENT_LOOPS.get(client.name, act_forever), client)
        scheduler.end()

    async def _run_without_faults(self, sim: SimContext, clients: list[Client]) -> None:
        for resumes in (False, True):  # First, runs that are paused may stay paused.
            if not await self._wait_until_all_ended(sim, clients, resumes=resumes):
                return
        if any([await ask_again(client) for client in clients]):
            for client in clients:
                await let_everything_end(client)
            if not await self._wait_until_all_ended(sim, clients):
                return
        for client in clients:
            await page_through_everything(client)
        sim.monitor.check_calm()
        # All clients and processes are absent for hours. What was deferred meanwhile is due on
        # their return.
        await _stop_processes(sim, ABSENCE_S)
        with trio.move_on_after(FINISH_WITHIN_S):
            while not _is_all_work_done(sim):
                await trio.sleep(POLL_S)
        sim.monitor.check_end()
        if (
            self._options.returns_after_expiry
            or sim.random("keys").random() < RETURN_AFTER_EXPIRY_SHARE
        ):
            # Workers stay away: they would remove what has expired before clients ask for it.
            absent_roles = {"worker"}
            await _stop_processes(
                sim, limits.IDEMPOTENCY_TTL_S + KEYS_EXPIRED_S, still_absent=absent_roles
            )
            for client in clients:
                await reuse_an_expired_key(client)
                await look_at_expired_bodies(client)
            _allow_restart(sim.processes)
            await trio.sleep(REMOVAL_S)
            sim.monitor.check_calm()

    async def _wait_until_all_ended(
        self, sim: SimContext, clients: list[Client], *, resumes: bool = True
    ) -> bool:
        """Lets clients close and resume what they find until every run has ended. A listing of jobs
        may be out of date, so they look again after a while."""
        with trio.move_on_after(self._options.liveness_s):
            while True:
                for client in clients:
                    await let_everything_end(client, resumes=resumes)
                with trio.move_on_after(REPEAT_S):
                    while _live_runs(sim, paused=resumes):
                        await trio.sleep(POLL_S)
                    return True
        self._failures += [
            f"run {run.run_id} of job {run.job_id} never ended"
            for run in _live_runs(sim, paused=resumes)
        ]
        return False

    def _report(self, sim: SimContext) -> Report:
        return Report(
            options=self._options,
            hash=sim.trace.hash,
            violations=sim.monitor.violations,
            liveness_failures=self._failures,
            crashes=sim.crashes,
            faults={
                **{fault.value: sim.faults.counts[fault] for fault in Fault},
                **sim.backend.fault_counts(),
            },
            kills=sim.history.kills_count,
            calls=sim.monitor.calls_count,
            requests=len(sim.history.calls),
            virtual_s=trio.current_time(),
            lines=sim.trace.lines,
        )


async def _stop_processes(
    sim: SimContext, seconds: float, *, still_absent: Collection[str] = ()
) -> None:
    """Ends all processes, and starts them again after this time, except those of some roles."""
    for process in sim.processes:
        process.restart_gate = trio.Event()
    with trio.move_on_after(seconds):
        while True:
            for process in sim.processes:
                process.terminate()  # Repeatedly, because a process may just be starting.
            await trio.sleep(REPEAT_S)
    _allow_restart([candidate for candidate in sim.processes if candidate.role not in still_absent])


def _allow_restart(processes: Iterable[Process]) -> None:
    for process in processes:
        if process.restart_gate is not None:
            process.restart_gate.set()
            process.restart_gate = None


def _live_runs(sim: SimContext, *, paused: bool) -> list[Run]:
    """The runs that have not ended. Paused runs count only if `paused` is True or a stop was
    requested."""
    live = [run for run in sim.monitor.check_calm().after.runs.values() if run.status in RUN_LIVE]
    if paused:
        return live
    return [
        run
        for run in live
        if run.pause_state is not PauseState.PAUSED or run.stop_requested_at is not None
    ]


def _is_all_work_done(sim: SimContext) -> bool:
    """Whether no work is left that the program would do within the hour."""
    now = sim.monitor.check_snapshot().after
    return not (
        any(notice.status is NoticeStatus.DUE for notice in now.notices.values())
        or any(export.status in EXPORT_UNDONE for export in now.exports.values())
        # The first passes of a deletion are minutes apart. A later due time was written by a clock
        # that was a day ahead, and a worker corrects it.
        or any(
            intent.passes_left > 0 or intent.due_at < now.now + 3600.0
            for intent in now.rows[ScrubKey].values()
        )
        or now.rows[CrossingKey]
        or now.leases
    )


def _processes(sim: SimContext, shared_clock: WallClock | None) -> list[Process]:
    options = sim.options
    if shared_clock is not None:
        names = ["dev"] + [f"helper{n}" for n in range(1, options.workers_count)]
        return [
            Process(name=name, role=name.rstrip("0123456789"), sim=sim, clock=shared_clock)
            for name in names
        ]
    random = sim.random("clocks")
    names = [f"api{n}" for n in range(options.apis_count)]
    names += [f"worker{n}" for n in range(options.workers_count)]
    return [
        Process(
            name=name,
            role=name.rstrip("0123456789"),
            sim=sim,
            clock=WallClock(
                random.uniform(-options.offset_s, options.offset_s),
                random.uniform(-options.drift, options.drift),
            ),
        )
        for name in names
    ]


def _count_unusual_options(options: Options, faults: Faults) -> None:
    """Counts the unusual options of this world as faults that occurred once."""
    is_apart = options.engine != "embedded"  # On the embedded engine all processes share one clock.
    unusual = {
        Fault.CLOCK_OFFSET: options.offset_s > 0 and is_apart,
        Fault.CLOCK_DRIFT: options.drift > 0 and is_apart,
        Fault.SMALL_CHUNKS: options.chunk_tasks == 1,
        Fault.SMALL_PAGES: options.page_rows <= 3,
        Fault.FEW_SHARDS: options.shard_count < 3,
        Fault.MANY_SHARDS: options.shard_count > 8,
        Fault.ONE_IN_FLIGHT: options.max_inflight == 1,
        Fault.HASTY_SWEEPER: options.sweep_s < SWEEP_S,
        Fault.ONE_MESSAGE_POLLS: options.receive_max == 1,
        Fault.NEVER_AT_ONCE: options.at_once_max == 0,
        Fault.ONE_SETTLE_A_COMMIT: options.settle_max == 1,
        Fault.HASTY_KEYS: options.limits == HASTY_KEYS,
        Fault.SHORT_LIVES: options.limits == SHORT_LIVES,
        Fault.SHORT_LISTS: options.limits == SHORT_LISTS,
    }
    for fault, holds in unusual.items():
        if holds:
            faults.count(fault)


class _Logs(logging.Handler):
    """Keeps what the program logs, for the checker that searches it for secrets. A logged error
    that was not injected counts as a crash of the program."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.sim: SimContext | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.sim is None:
            return
        self.sim.history.logged.append(str(record.__dict__))
        error = record.exc_info[1] if record.exc_info else None
        is_error = record.levelno >= logging.ERROR
        is_outage = record.msg == OUTAGE_LOGGED
        if is_error and not is_outage and not _is_injected(error, getattr(record, "child", "")):
            self.sim.report_crash("log", f"{record.getMessage()} {error!r}")


def _is_injected(error: BaseException | None, child: str) -> bool:
    """Whether the simulator caused the error. A shard writer is expected to crash when the store
    stays unavailable."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_injected(inner, child) for inner in error.exceptions)
    if isinstance(error, Unavailable):
        return child.startswith("shard_writer")
    return isinstance(error, Killed | InjectedCrash | trio.Cancelled)


@contextmanager
def _capture_logs() -> Iterator[_Logs]:
    """Captures the logs of the program instead of printing them."""
    root, logs = logging.getLogger(), _Logs()
    before, level = root.handlers[:], root.level
    root.handlers = [logs]
    root.setLevel(logging.INFO)
    try:
        yield logs
    finally:
        root.handlers = before
        root.setLevel(level)


@contextmanager
def _temporary_directory(options: Options) -> Iterator[Path]:
    """A temporary directory, in memory where the machine has a file system for that: it need not
    survive a power cut, and memory is faster."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix=f"conveyor-{options.seed}-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _random_of(options: Options, whose: str) -> Random:
    return Random(f"{whose} {options.seed}")
