"""Stage: everything that the parts of one simulated world share."""

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
    options: Options
    trace: Trace
    faults: Faults
    history: History
    watcher: InvariantMonitor
    backend: Backend
    gateway: GatewayModel
    processes: list[Process] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    def random(self, whose: str) -> Random:
        """A stream of its own for everybody: what one draws does not move the others."""
        return Random(f"{whose} {self.options.seed}")

    def crashed(self, who: str, what: str) -> None:
        """Something of ours failed in a way that nobody foresaw."""
        self.crashes.append(f"{who}: {what}")
        self.trace.note(who, "crashed", what)
