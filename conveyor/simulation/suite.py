"""Runs many seeds on all cores, and returns their reports in the order of the seeds
(docs/simulator.md)."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from conveyor.simulation.faults.faults import ONLY_ON, Fault
from conveyor.simulation.models.fault_rates import FAULTS as MODEL_FAULTS
from conveyor.simulation.options import draw
from conveyor.simulation.simulator import Report, simulate

JUDGED_FROM = 200
"""From this many seeds on, a fault that never occurred fails the suite."""

HASH_EVERY = 1_000
"""The hash over all traces is kept every so many seeds, to compare a shorter run with a longer
one."""

# A worker process is replaced after this many seeds, so that memory of finished worlds is returned.
_SEEDS_A_PROCESS = 20
# The engine reads its table consistently, so no read is stale. What clients store here is too short
# for an upload in parts, so none is left open.
OPTIONAL_FAULTS = frozenset({"dynamodb.stale_read", "s3.left_open"})
"""Faults that need not occur."""

# Few worlds draw an outage of the gateway, and it has one of two kinds: 10 of 805 seeds had the
# first. A key that a bulk delete leaves behind needs a deletion on AWS: 200 seeds had it once, or
# not at all.
RARE_FAULTS = frozenset({"gateway_unreachable", "gateway_failing", "s3.undeleted"})
RARE_JUDGED_FROM = 600
"""From this many seeds on, a rare fault that never occurred fails the suite."""


@dataclass(slots=True)
class Summary:
    """The sums over all seeds so far."""

    seeds: int = 0
    violations: int = 0
    liveness_failures: int = 0
    crashes: int = 0
    kills: int = 0
    calls: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    took_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    marks: dict[int, str] = field(default_factory=dict)
    _hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, report: Report) -> None:
        """Adds the report of one seed."""
        self.seeds += 1
        self.violations += len(report.violations)
        self.liveness_failures += len(report.liveness_failures)
        self.crashes += len(report.crashes)
        self.kills += report.kills
        self.calls += report.calls
        self.requests += report.requests
        self.virtual_s += report.virtual_s
        self.took_s += report.took_s
        self.faults.update(report.faults)
        self.engines[report.options.engine] += 1
        if not report.has_passed:
            self.failed.append(report.options.seed)
        self._hash.update(report.hash.encode())
        if self.seeds % HASH_EVERY == 0:
            self.marks[self.seeds] = self.hash

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()

    def never_occurred(self) -> list[str]:
        """The faults that the drawn engines can have and that never occurred; empty while there are
        too few seeds to judge."""
        if self.seeds < JUDGED_FROM:
            return []
        excused = (
            OPTIONAL_FAULTS if self.seeds >= RARE_JUDGED_FROM else OPTIONAL_FAULTS | RARE_FAULTS
        )
        return [name for name in self.possible() if not self.faults[name] and name not in excused]

    def possible(self) -> list[str]:
        """The faults that the drawn engines can have."""
        engines = set(self.engines)
        known = [fault.value for fault in Fault if ONLY_ON.get(fault, engines) & engines]
        return known + [name for name in MODEL_FAULTS if {"aws", "mixed"} & engines]


def run_seeds(
    seeds: Sequence[int], *, engine: str | None = None, hours: float | None = None
) -> Iterator[Report]:
    """Yields one report per seed, in order. With many seeds, only reports of failed seeds keep
    their trace lines."""
    one = partial(run_seed, engine=engine, hours=hours)
    if len(seeds) == 1:
        yield one(seeds[0])
        return
    context = multiprocessing.get_context("spawn")
    count = min(len(seeds), len(os.sched_getaffinity(0)))
    with context.Pool(count, maxtasksperchild=_SEEDS_A_PROCESS) as pool:
        yield from pool.imap(partial(_without_lines, one), seeds)


def run_seed(seed: int, *, engine: str | None = None, hours: float | None = None) -> Report:
    options = draw(seed, engine=engine, hours=hours)
    began_s = time.process_time()
    try:
        report = simulate(options)
        return replace(report, took_s=time.process_time() - began_s)
    except Exception as error:  # noqa: BLE001 (the other seeds go on)
        text = "".join(traceback.format_exception(error))
        return Report(options=options, hash="", crashes=[f"the simulator itself failed: {text}"])


def _without_lines(one: partial[Report], seed: int) -> Report:
    report = one(seed)
    return replace(report, lines=[] if report.has_passed else report.lines)
