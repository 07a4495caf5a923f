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
NONE_S = (10.0, 90.0)
# The time between two leaps of clocks.
LEAP_EVERY_S = (10.0, 60.0)
NEIGHBOUR_OUTAGE_S = (20.0, 300.0)
"""Long enough for every circuit breaker to open, and often as long as the rest of the phase with
faults."""


@dataclass(slots=True)
class FaultScheduler:
    """Draws the instants and kinds of these faults, and carries them out."""

    stage: SimContext
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = self.stage.random("chaos")

    async def run(self) -> None:
        """Causes one fault after another until it is cancelled."""
        deeds: list[Callable[[], Awaitable[None]]] = [
            self._pause,
            self._terminate,
            self._storm,
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
                await trio.sleep(self.random.expovariate(1.0 / self.stage.options.disturb_s))
                nursery.start_soon(self.random.choice(deeds))

    def end(self) -> None:
        """Ends all faults: paused processes go on, held ones may start, and clocks are set
        right."""
        self.stage.faults.calm_down()
        self.stage.backend.calm_down()
        for process in self.stage.processes:
            if process.life is not None:
                process.life.resume()
            if process.held is not None:
                process.held.set()
                process.held = None
            process.clock.set_right()
        self.stage.trace.note("chaos", "over")

    async def _fail_storage(self) -> None:
        """From time to time body storage is full, missing, or refuses access."""
        every_s = self.stage.options.neighbours.storage_outage_every_s
        random = self.stage.random("storage outages")
        while every_s:
            await trio.sleep(random.expovariate(1.0 / every_s))
            self.stage.faults.storage_outage = fault = random.choice(storage_outage.OUTAGES)
            self.stage.trace.note("storage", "is away", fault.value)
            await trio.sleep(random.uniform(*NEIGHBOUR_OUTAGE_S))
            self.stage.faults.storage_outage = None
            self.stage.trace.note("storage", "is back")

    async def _fail_gateway(self) -> None:
        """From time to time the gateway refuses every call."""
        every_s = self.stage.options.neighbours.gateway_outage_every_s
        random = self.stage.random("gateway outages")
        while every_s:
            await trio.sleep(random.expovariate(1.0 / every_s))
            self.stage.gateway.outage = fault = random.choice(gateway.OUTAGES)
            self.stage.trace.note("gateway", "is away", fault.value)
            self.stage.history.gateway_outages += 1
            seconds = random.uniform(*NEIGHBOUR_OUTAGE_S)
            self.stage.history.gateway_away_s += seconds
            await trio.sleep(seconds)
            self.stage.gateway.outage = None
            self.stage.trace.note("gateway", "is back")

    async def _cut_power(self) -> None:
        """From time to time all processes end at once, and what was not synced is lost."""
        every_s = self.stage.options.neighbours.power_cut_every_s
        random = self.stage.random("power cuts")
        while every_s:
            await trio.sleep(random.expovariate(1.0 / every_s))
            if self.stage.backend.cut_power():
                self.stage.faults.count(Fault.POWER_CUT)
                self.stage.trace.note("chaos", "power cut")
                for process in self.stage.processes:
                    process.kill()

    async def _leap_clocks(self) -> None:
        """From time to time the clocks of one process, or of all, leap far ahead or back."""
        leap_s = self.stage.options.neighbours.clock_leap_s
        random = self.stage.random("clock leaps")
        while leap_s:
            await trio.sleep(random.uniform(*LEAP_EVERY_S))
            seconds = leap_s * random.choice((-1.0, 1.0))
            processes = self.stage.processes
            leaping = processes if random.random() < 0.5 else [random.choice(processes)]
            is_back = seconds < 0
            self.stage.faults.count(Fault.CLOCK_LEAPT_BACK if is_back else Fault.CLOCK_LEAPT)
            clocks = {id(process.clock): process.clock for process in leaping}
            for clock in clocks.values():
                clock.step(seconds)
            self.stage.trace.note("chaos", "clocks leapt", f"{len(clocks)} by {seconds:.0f}")

    async def _pause(self) -> None:
        process = self._some_process()
        if process.life is not None and process.life.resumed is None:
            self.stage.faults.count(Fault.PAUSED)
            life = process.life
            life.pause()
            await trio.sleep(self.random.uniform(*PAUSE_S))
            life.resume()

    async def _terminate(self) -> None:
        self.stage.faults.count(Fault.TERMINATED)
        self._some_process().terminate()

    async def _storm(self) -> None:
        self.stage.faults.count(Fault.RESTART_STORM)
        for process in self.stage.processes:
            process.kill()

    async def _scale_to_none(self) -> None:
        """All workers are terminated, and start again together after a while."""
        workers = [process for process in self.stage.processes if process.role != "api"]
        if any(worker.held is not None for worker in workers):
            return
        self.stage.faults.count(Fault.SCALED_TO_NONE)
        back = trio.Event()
        for worker in workers:
            worker.held = back
            worker.terminate()
        await trio.sleep(self.random.uniform(*NONE_S))
        back.set()
        for worker in workers:
            worker.held = None

    async def _outage(self) -> None:
        self.stage.trace.note("chaos", "outage")
        self.stage.faults.count(Fault.OUTAGE)
        self.stage.faults.begin_outage()
        await trio.sleep(self.random.uniform(*OUTAGE_DURATION_S))
        self.stage.faults.end_outage()

    async def _step_a_clock(self) -> None:
        step_s = self.stage.options.step_s
        if not step_s:
            return
        seconds = self.random.uniform(-step_s, step_s)
        self.stage.faults.count(Fault.CLOCK_PUT_BACK if seconds < 0 else Fault.CLOCK_STEPPED)
        process = self._some_process()
        process.clock.step(seconds)
        self.stage.trace.note(process.name, "clock stepped", f"{seconds:.3f}")

    async def _lose_leases(self) -> None:
        if self.stage.backend.lose_leases():
            self.stage.faults.count(Fault.LEASES_LOST)
            self.stage.trace.note("chaos", "leases lost")

    def _some_process(self) -> Process:
        return self.random.choice(self.stage.processes)
