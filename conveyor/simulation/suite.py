"""Suite: many seeds, on all cores, with their reports in the order of the seeds
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
"""How many seeds it takes until a fault that never struck is a failure of the suite."""

MARKED_EVERY = 1_000
"""After so many seeds the hash is kept: a shorter run can be compared with a long one."""

_SEEDS_A_PROCESS = 20
# The engine reads its table consistently, and what is stored here is too short for several parts.
UNASKED = frozenset({"dynamodb.stale_read", "s3.left_open"})
"""Faults that need not strike."""

# Few worlds draw an outage of the gateway, of one of two kinds: 10 of 805 seeds had the first. A
# refused key of a bulk delete needs a deletion on AWS: 200 seeds had it once, or never.
RARE = frozenset({"gateway_unreachable", "gateway_failing", "s3.undeleted"})
RARE_JUDGED_FROM = 600
"""How many seeds it takes until a rare fault that never struck is a failure of the suite."""


@dataclass(slots=True)
class Summary:
    """What came of all seeds so far."""

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
        if not report.is_well:
            self.failed.append(report.options.seed)
        self._hash.update(report.hash.encode())
        if self.seeds % MARKED_EVERY == 0:
            self.marks[self.seeds] = self.hash

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()

    def never_struck(self) -> list[str]:
        """The faults that these engines can have, and did not; none while seeds are few."""
        if self.seeds < JUDGED_FROM:
            return []
        excused = UNASKED if self.seeds >= RARE_JUDGED_FROM else UNASKED | RARE
        return [name for name in self.possible() if not self.faults[name] and name not in excused]

    def possible(self) -> list[str]:
        """The faults that these engines can have."""
        engines = set(self.engines)
        known = [fault.value for fault in Fault if ONLY_ON.get(fault, engines) & engines]
        return known + [name for name in MODEL_FAULTS if {"aws", "mixed"} & engines]


def run_seeds(
    seeds: Sequence[int], *, engine: str | None = None, hours: float | None = None
) -> Iterator[Report]:
    """A report a seed, in order; of many, reports of good seeds come without their lines."""
    one = partial(run_seed, engine=engine, hours=hours)
    if len(seeds) == 1:
        yield one(seeds[0])
        return
    context = multiprocessing.get_context("spawn")
    count = min(len(seeds), len(os.sched_getaffinity(0)))
    with context.Pool(count, maxtasksperchild=_SEEDS_A_PROCESS) as pool:
        yield from pool.imap(partial(_in_short, one), seeds)


def run_seed(seed: int, *, engine: str | None = None, hours: float | None = None) -> Report:
    options = draw(seed, engine=engine, hours=hours)
    began_s = time.process_time()
    try:
        report = simulate(options)
        return replace(report, took_s=time.process_time() - began_s)
    except Exception as error:  # noqa: BLE001 (the other seeds go on)
        text = "".join(traceback.format_exception(error))
        return Report(options=options, hash="", crashes=[f"the simulator itself failed: {text}"])


def _in_short(one: partial[Report], seed: int) -> Report:
    report = one(seed)
    return replace(report, lines=[] if report.is_well else report.lines)
