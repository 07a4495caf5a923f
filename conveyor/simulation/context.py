"""The context of one simulated world: the objects that its parts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from conveyor.simulation.backends.backends import Backend
from conveyor.simulation.client_history import History
from conveyor.simulation.environment.gateway import GatewayModel
from conveyor.simulation.faults.faults import Faults
from conveyor.simulation.invariant_monitor import InvariantMonitor
from conveyor.simulation.options import Options
from conveyor.simulation.trace.trace import Trace

if TYPE_CHECKING:
    from conveyor.simulation.process import Process


@dataclass(slots=True, kw_only=True)
class SimContext:
    """The shared objects of one world; every client, process and scheduler holds this context."""

    options: Options
    trace: Trace
    faults: Faults
    history: History
    monitor: InvariantMonitor
    backend: Backend
    gateway: GatewayModel
    processes: list[Process] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    def random(self, owner: str) -> Random:
        """Returns a random stream for one part, so that what it draws does not change what others
        draw."""
        return Random(f"{owner} {self.options.seed}")

    def report_crash(self, source: str, error: str) -> None:
        """Records an error of the program that the simulator did not inject; the seed fails because
        of it."""
        self.crashes.append(f"{source}: {error}")
        self.trace.note(source, "crashed", error)
