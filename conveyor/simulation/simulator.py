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
    use_an_old_key,
)
from conveyor.simulation.context import SimContext
from conveyor.simulation.environment.gateway import GatewayModel
from conveyor.simulation.environment.neighbours import DAY_S
from conveyor.simulation.faults.fault_scheduler import FaultScheduler
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.faults.process_faults import InjectedCrash, Killed
from conveyor.simulation.faults.skewed_clock import WallClock
from conveyor.simulation.invariant_monitor import InvariantMonitor, Violation
from conveyor.simulation.options import SWEEP_S, Options
from conveyor.simulation.process import Process
from conveyor.simulation.profiles import HASTY_KEYS, IDLE_S_MAX, SHORT_LISTS, SHORT_LIVES
from conveyor.simulation.swaps import combined, setting
from conveyor.simulation.trace.trace import Line, Trace

# How often the simulator looks whether all runs have ended.
POLL_S = 5.0
# How long clients wait before they close again what they find, and processes are told to end again.
AGAIN_S = 120.0
# How long all clients and processes are absent: longer than every retry delay and deletion pass.
LONG_REST_S = 4 * 3600.0
# How long workers have to remove expired bodies, once they are back.
EXPIRED_S = 900.0
OLD_KEYS = 0.1
"""The share of worlds in which clients return once more, after idempotency keys have expired."""
# How long the program may take to finish deferred work after everybody has returned.
REST_WITHIN_S = 1800.0

_ACTS = {hostile.NAME: hostile.act_hostile, calm.NAME: calm.submit_small_jobs}


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
    def is_well(self) -> bool:
        return not (self.violations or self.liveness_failures or self.crashes)


def simulate(options: Options) -> Report:
    """Runs one seed in this process."""
    odd = [setting(f"conveyor.domain.limits:{name}", s) for name, s in options.limits.items()]
    odd.append(setting("conveyor.domain.timing:IDLE_S_MAX", IDLE_S_MAX))
    with _scratch(options) as data_dir, _quiet() as logs, combined(*odd)():
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
        stage = self._stage()
        self._logs.stage = stage
        await stage.backend.prepare()
        clients = [Client(f"tenant{n}", stage) for n in range(self._options.clients_count)]
        if self._options.neighbours.hostile:
            clients.append(Client(hostile.NAME, stage))
        if self._options.neighbours.measures_fairness:
            clients.append(Client(calm.NAME, stage))
        chaos = FaultScheduler(stage)
        with self._over:
            async with trio.open_nursery() as nursery:
                for process in stage.processes:
                    nursery.start_soon(process.run)
                await self._safety(stage, clients, chaos)
                await self._liveness(stage, clients)
                nursery.cancel_scope.cancel()
        stage.backend.close()
        return self._report(stage)

    def _stage(self) -> SimContext:
        options, trace = self._options, Trace()
        has_wrong_clocks = bool(options.step_s or options.neighbours.clock_leap_s)
        history = History(
            is_spared=options.is_spared,
            # Where a clock was wrong, the times in leases cannot be compared with the right time.
            sees_leases=options.check_every == 1 and not has_wrong_clocks,
            workers_count=options.workers_count,
            sweep_s=options.sweep_s,
            scan_s=DELTA_S if options.engine in {"aws", "mixed"} and not options.has_redis else 0.0,
            steps_clocks=options.step_s > 0,
            is_orderly=options.neighbours.is_orderly,
            has_gateway=options.has_gateway,
            gateway_lies=options.neighbours.gateway_lies,
            has_wrong_clocks=has_wrong_clocks,
            leaps_days=options.neighbours.clock_leap_s >= DAY_S,
            quotas=options.neighbours.quotas,
        )
        rates = options.rate_of | {Fault.OUT_OF_RESOURCES: options.neighbours.shortage_rate}
        faults = Faults(rates, _random_of(options, "faults"))
        backend, clock = self._backend(faults)
        watcher = InvariantMonitor(
            peek=backend.peek,
            body=backend.body,
            bodies=backend.bodies,
            checkers=ALL,
            history=history,
            trace=trace,
            check_every=options.check_every,
            calls_max=options.calls_max,
            rows_come_first=backend.rows_come_first,
            remains=backend.remains,
            queued=backend.queued,
            on_violation=lambda: self._over.cancel(reason="an invariant is broken"),
            on_flood=self._flooded,
        )
        stage = SimContext(
            options=options,
            trace=trace,
            faults=faults,
            history=history,
            watcher=watcher,
            backend=backend,
            gateway=GatewayModel(
                plan=options.neighbours.gateway_plan,
                lies=options.neighbours.gateway_lies,
                random=_random_of(options, "gateway"),
                faults=faults,
                history=history,
            ),
        )
        stage.processes = _processes(stage, clock)
        _count_odds(options, faults)
        return stage

    def _flooded(self) -> None:
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
                has_power_cuts=self._options.neighbours.power_cut_every_s > 0,
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

    async def _safety(
        self, stage: SimContext, clients: list[Client], chaos: FaultScheduler
    ) -> None:
        for client in clients:
            if client.name == calm.NAME:
                await calm.submit_alone(client)
        with trio.move_on_after(self._options.safety_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chaos.run)
                for client in clients:
                    nursery.start_soon(_ACTS.get(client.name, act_forever), client)
        chaos.end()

    async def _liveness(self, stage: SimContext, clients: list[Client]) -> None:
        for resumes in (False, True):  # First, runs that are paused may stay paused.
            if not await self._all_ended(stage, clients, resumes=resumes):
                return
        if any([await ask_again(client) for client in clients]):
            for client in clients:
                await let_everything_end(client)
            if not await self._all_ended(stage, clients):
                return
        for client in clients:
            await page_through_everything(client)
        stage.watcher.ease()
        # All clients and processes are absent for hours. What was deferred meanwhile is due on
        # their return.
        await _leave_alone(stage, LONG_REST_S)
        with trio.move_on_after(REST_WITHIN_S):
            while not _is_at_rest(stage):
                await trio.sleep(POLL_S)
        stage.watcher.end()
        if self._options.outlives_results or stage.random("keys").random() < OLD_KEYS:
            # Workers stay away: they would remove what has expired before clients ask for it.
            away = {"worker"}
            await _leave_alone(stage, limits.IDEMPOTENCY_TTL_S + KEYS_EXPIRED_S, still_away=away)
            for client in clients:
                await use_an_old_key(client)
                await look_at_expired_bodies(client)
            _bring_back(stage.processes)
            await trio.sleep(EXPIRED_S)
            stage.watcher.ease()

    async def _all_ended(
        self, stage: SimContext, clients: list[Client], *, resumes: bool = True
    ) -> bool:
        """Lets clients close and resume what they find until every run has ended. A listing of jobs
        may be out of date, so they look again after a while."""
        with trio.move_on_after(self._options.liveness_s):
            while True:
                for client in clients:
                    await let_everything_end(client, resumes=resumes)
                with trio.move_on_after(AGAIN_S):
                    while _live_runs(stage, paused=resumes):
                        await trio.sleep(POLL_S)
                    return True
        self._failures += [
            f"run {run.run_id} of job {run.job_id} never ended"
            for run in _live_runs(stage, paused=resumes)
        ]
        return False

    def _report(self, stage: SimContext) -> Report:
        return Report(
            options=self._options,
            hash=stage.trace.hash,
            violations=stage.watcher.violations,
            liveness_failures=self._failures,
            crashes=stage.crashes,
            faults={
                **{fault.value: stage.faults.counts[fault] for fault in Fault},
                **stage.backend.fired(),
            },
            kills=stage.history.kills_count,
            calls=stage.watcher.calls_count,
            requests=len(stage.history.calls),
            virtual_s=trio.current_time(),
            lines=stage.trace.lines,
        )


async def _leave_alone(
    stage: SimContext, seconds: float, *, still_away: Collection[str] = ()
) -> None:
    """Ends all processes, and starts them again after this time, except those of some roles."""
    for process in stage.processes:
        process.held = trio.Event()
    with trio.move_on_after(seconds):
        while True:
            for process in stage.processes:
                process.terminate()  # Repeatedly, because a process may just be starting.
            await trio.sleep(AGAIN_S)
    _bring_back([candidate for candidate in stage.processes if candidate.role not in still_away])


def _bring_back(processes: Iterable[Process]) -> None:
    for process in processes:
        if process.held is not None:
            process.held.set()
            process.held = None


def _live_runs(stage: SimContext, *, paused: bool) -> list[Run]:
    """The runs that have not ended. Paused runs count only if `paused` is True or a stop was
    requested."""
    live = [run for run in stage.watcher.ease().after.runs.values() if run.status in RUN_LIVE]
    if paused:
        return live
    return [
        run
        for run in live
        if run.pause_state is not PauseState.PAUSED or run.stop_requested_at is not None
    ]


def _is_at_rest(stage: SimContext) -> bool:
    """Whether no work is left that the program would do within the hour."""
    now = stage.watcher.check_snapshot().after
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


def _processes(stage: SimContext, shared_clock: WallClock | None) -> list[Process]:
    options = stage.options
    if shared_clock is not None:
        names = ["dev"] + [f"helper{n}" for n in range(1, options.workers_count)]
        return [
            Process(name=name, role=name.rstrip("0123456789"), stage=stage, clock=shared_clock)
            for name in names
        ]
    random = stage.random("clocks")
    names = [f"api{n}" for n in range(options.apis_count)]
    names += [f"worker{n}" for n in range(options.workers_count)]
    return [
        Process(
            name=name,
            role=name.rstrip("0123456789"),
            stage=stage,
            clock=WallClock(
                random.uniform(-options.offset_s, options.offset_s),
                random.uniform(-options.drift, options.drift),
            ),
        )
        for name in names
    ]


def _count_odds(options: Options, faults: Faults) -> None:
    """Counts the unusual options of this world as faults that occurred once."""
    is_apart = options.engine != "embedded"  # On the embedded engine all processes share one clock.
    odds = {
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
    for fault, holds in odds.items():
        if holds:
            faults.count(fault)


class _Logs(logging.Handler):
    """Keeps what the program logs, for the checker that searches it for secrets. A logged error
    that was not injected counts as a crash of the program."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.stage: SimContext | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.stage is None:
            return
        self.stage.history.logged.append(str(record.__dict__))
        error = record.exc_info[1] if record.exc_info else None
        is_error = record.levelno >= logging.ERROR
        is_outage = record.msg == OUTAGE_LOGGED
        if is_error and not is_outage and not _is_meant(error, getattr(record, "child", "")):
            self.stage.crashed("log", f"{record.getMessage()} {error!r}")


def _is_meant(error: BaseException | None, child: str) -> bool:
    """Whether the simulator caused the error. A shard writer is expected to crash when the store
    stays unavailable."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_meant(inner, child) for inner in error.exceptions)
    if isinstance(error, Unavailable):
        return child.startswith("shard_writer")
    return isinstance(error, Killed | InjectedCrash | trio.Cancelled)


@contextmanager
def _quiet() -> Iterator[_Logs]:
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
def _scratch(options: Options) -> Iterator[Path]:
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
