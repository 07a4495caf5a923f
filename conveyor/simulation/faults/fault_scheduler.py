"""The fault scheduler: faults of whole processes, clocks and engines, while faults are on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import trio

from conveyor.simulation.backends import storage_outage
from conveyor.simulation.context import SimContext
from conveyor.simulation.environment import gateway
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.process import Process

# A paused process may outlive its leases (30 s) and claims (50 s), or not.
PAUSE_S = (20.0, 120.0)
# How long no engine answers.
OUTAGE_DURATION_S = (2.0, 60.0)
# How long no worker runs.
SCALED_TO_NONE_S = (10.0, 90.0)
# The time between two leaps of clocks.
LEAP_EVERY_S = (10.0, 60.0)
CONDITION_OUTAGE_S = (20.0, 300.0)
"""Long enough for every circuit breaker to open, and often as long as the rest of the phase with
faults."""


@dataclass(slots=True)
class FaultScheduler:
    """Draws the instants and kinds of these faults, and carries them out."""

    sim: SimContext
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        # The name of a stream decides what it draws: another one would change every recorded world.
        self.random = self.sim.random("chaos")

    async def run(self) -> None:
        """Causes one fault after another until it is cancelled."""
        actions: list[Callable[[], Awaitable[None]]] = [
            self._pause,
            self._terminate,
            self._kill_all,
            self._scale_to_none,
            self._outage,
            self._step_a_clock,
            self._lose_leases,
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fail_storage)
            nursery.start_soon(self._fail_gateway)
            nursery.start_soon(self._cut_power)
            nursery.start_soon(self._leap_clocks)
            while True:
                await trio.sleep(self.random.expovariate(1.0 / self.sim.options.disturb_s))
                nursery.start_soon(self.random.choice(actions))

    def end(self) -> None:
        """Ends all faults: paused processes go on, held ones may start, and clocks are set
        right."""
        self.sim.faults.stop_faults()
        self.sim.backend.stop_faults()
        for process in self.sim.processes:
            if process.injector is not None:
                process.injector.resume()
            if process.restart_gate is not None:
                process.restart_gate.set()
                process.restart_gate = None
            process.clock.set_right()
        self.sim.trace.note("chaos", "over")

    async def _fail_storage(self) -> None:
        """From time to time body storage is full, missing, or refuses access."""
        every_s = self.sim.options.conditions.storage_outage_every_s
        random = self.sim.random("storage outages")
        while every_s:
            await trio.sleep(random.expovariate(1.0 / every_s))
            self.sim.faults.storage_outage = fault = random.choice(storage_outage.OUTAGES)
            self.sim.trace.note("storage", "is away", fault.value)
            await trio.sleep(random.uniform(*CONDITION_OUTAGE_S))
            self.sim.faults.storage_outage = None
            self.sim.trace.note("storage", "is back")

    async def _fail_gateway(self) -> None:
        """From time to time the gateway refuses every call."""
        every_s = self.sim.options.conditions.gateway_outage_every_s
        random = self.sim.random("gateway outages")
        while every_s:
            await trio.sleep(random.expovariate(1.0 / every_s))
            self.sim.gateway.outage = fault = random.choice(gateway.OUTAGES)
            self.sim.trace.note("gateway", "is away", fault.value)
            self.sim.history.gateway_outages += 1
            seconds = random.uniform(*CONDITION_OUTAGE_S)
            self.sim.history.gateway_away_s += seconds
            await trio.sleep(seconds)
            self.sim.gateway.outage = None
            self.sim.trace.note("gateway", "is back")

    async def _cut_power(self) -> None:
        """From time to time all processes end at once, and what was not synced is lost."""
        every_s = self.sim.options.conditions.power_cut_every_s
        random = self.sim.random("power cuts")
        while every_s:
            await trio.sleep(random.expovariate(1.0 / every_s))
            if self.sim.backend.cut_power():
                self.sim.faults.count(Fault.POWER_CUT)
                self.sim.trace.note("chaos", "power cut")
                for process in self.sim.processes:
                    process.kill()

    async def _leap_clocks(self) -> None:
        """From time to time the clocks of one process, or of all, leap far ahead or back."""
        leap_s = self.sim.options.conditions.clock_leap_s
        random = self.sim.random("clock leaps")
        while leap_s:
            await trio.sleep(random.uniform(*LEAP_EVERY_S))
            seconds = leap_s * random.choice((-1.0, 1.0))
            processes = self.sim.processes
            leaping = processes if random.random() < 0.5 else [random.choice(processes)]
            is_back = seconds < 0
            self.sim.faults.count(Fault.CLOCK_LEAPT_BACK if is_back else Fault.CLOCK_LEAPT)
            clocks = {id(process.clock): process.clock for process in leaping}
            for clock in clocks.values():
                clock.step(seconds)
            self.sim.trace.note("chaos", "clocks leapt", f"{len(clocks)} by {seconds:.0f}")

    async def _pause(self) -> None:
        process = self._some_process()
        if process.injector is not None and process.injector.resumed is None:
            self.sim.faults.count(Fault.PAUSED)
            injector = process.injector
            injector.pause()
            await trio.sleep(self.random.uniform(*PAUSE_S))
            injector.resume()

    async def _terminate(self) -> None:
        self.sim.faults.count(Fault.TERMINATED)
        self._some_process().terminate()

    async def _kill_all(self) -> None:
        self.sim.faults.count(Fault.RESTART_STORM)
        for process in self.sim.processes:
            process.kill()

    async def _scale_to_none(self) -> None:
        """All workers are terminated, and start again together after a while."""
        workers = [process for process in self.sim.processes if process.role != "api"]
        if any(worker.restart_gate is not None for worker in workers):
            return
        self.sim.faults.count(Fault.SCALED_TO_NONE)
        back = trio.Event()
        for worker in workers:
            worker.restart_gate = back
            worker.terminate()
        await trio.sleep(self.random.uniform(*SCALED_TO_NONE_S))
        back.set()
        for worker in workers:
            worker.restart_gate = None

    async def _outage(self) -> None:
        self.sim.trace.note("chaos", "outage")
        self.sim.faults.count(Fault.OUTAGE)
        self.sim.faults.begin_outage()
        await trio.sleep(self.random.uniform(*OUTAGE_DURATION_S))
        self.sim.faults.end_outage()

    async def _step_a_clock(self) -> None:
        step_s = self.sim.options.step_s
        if not step_s:
            return
        seconds = self.random.uniform(-step_s, step_s)
        self.sim.faults.count(Fault.CLOCK_PUT_BACK if seconds < 0 else Fault.CLOCK_STEPPED)
        process = self._some_process()
        process.clock.step(seconds)
        self.sim.trace.note(process.name, "clock stepped", f"{seconds:.3f}")

    async def _lose_leases(self) -> None:
        if self.sim.backend.lose_leases():
            self.sim.faults.count(Fault.LEASES_LOST)
            self.sim.trace.note("chaos", "leases lost")

    def _some_process(self) -> Process:
        return self.random.choice(self.sim.processes)
