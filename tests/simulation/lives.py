"""Lives for tests: of one process, in a world that does to it what a test says."""

from __future__ import annotations

from functools import partial
from random import Random

from conveyor.engines.aws.errors import NoAnswer
from conveyor.simulation.faults import Fault, Faults
from conveyor.simulation.history import History
from conveyor.simulation.life import Life
from conveyor.simulation.options import CALLS_MAX
from conveyor.simulation.snapshot import Snapshot
from conveyor.simulation.trace import Trace
from conveyor.simulation.watcher import Checkers, Watcher


def nothing() -> Snapshot:
    return Snapshot(at=0.0, now=0.0, rows={}, leases=[])


def life_with(*faults: Fault) -> Life:
    """These strike every time, and no others. Nobody looks at what it writes."""
    history, trace = History(), Trace()
    watcher = Watcher(
        peek=nothing,
        body=lambda _: None,
        bodies=list,
        checkers=Checkers(),
        history=history,
        trace=trace,
        check_every=1,
        calls_max=CALLS_MAX,
        on_violation=lambda: None,
        on_flood=lambda: None,
    )
    return Life(
        name="worker",
        trace=trace,
        faults=Faults(dict.fromkeys(faults, 1.0), Random(1)),
        random=Random(1),
        latency_s=0.0,
        watcher=watcher,
        refusal=partial(NoAnswer, was_sent=False),
        is_harsh=False,
    )
