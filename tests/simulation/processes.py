"""Builds the faults of a single process for tests."""

from __future__ import annotations

from functools import partial
from random import Random

from conveyor.engines.aws.errors import NoResponse
from conveyor.simulation.backends.snapshot import Snapshot
from conveyor.simulation.client_history import History
from conveyor.simulation.faults.fault_injector import FaultInjector
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.invariant_monitor import Checkers, InvariantMonitor
from conveyor.simulation.options import CALLS_MAX
from conveyor.simulation.trace.trace import Trace


def nothing() -> Snapshot:
    return Snapshot(at=0.0, now=0.0, rows={}, leases=[])


def faults_of_process(*faults: Fault) -> FaultInjector:
    """Makes these faults occur every time, and no others. No test reads the trace."""
    history, trace = History(), Trace()
    monitor = InvariantMonitor(
        take_snapshot=nothing,
        body=lambda _: None,
        bodies=list,
        checkers=Checkers(),
        history=history,
        trace=trace,
        check_every=1,
        calls_max=CALLS_MAX,
        on_violation=lambda: None,
        on_too_many_calls=lambda: None,
    )
    return FaultInjector(
        name="worker",
        trace=trace,
        faults=Faults(dict.fromkeys(faults, 1.0), Random(1)),
        random=Random(1),
        latency_s=0.0,
        monitor=monitor,
        refusal=partial(NoResponse, was_sent=False),
        has_call_faults=False,
    )
