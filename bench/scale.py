"""Where is the next limit of a fleet, and what lifts it?

The real workers run in virtual time on modelled AWS, which takes no more than AWS says it does: a
thousand write units a second and partition, four thousand on a cold table. One caller has a long
list, many others a short one each. A part of the long list tells how fast a million would go.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import trio
from trio.testing import MockClock

from bench.figure import Panel, draw
from bench.fleet import Fleet, Plan, a_fleet
from conveyor.domain.changes import RunKey
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.simulation.models.dynamodb.capacity import Place
from conveyor.usecases.jobs import Accepted
from conveyor.usecases.lookups import totals_of

RESULTS = Path(__file__).parent / "results"
MILLION = 1_000_000
COLD, WARM = 4_000.0, 40_000.0
PARTITION_WRITES = 1_000.0
ROUNDS = 6  # As many pages in the long list as make so many for each slot.
SMALL = 10
CALLERS = 200
LOOK_S = 1.0
STEADY = (0.2, 0.8)  # Filling up and running dry, a sixth each, tell nothing about a million.


class Arm(msgspec.Struct, frozen=True):
    """A fleet to try: its plan, and what is different about it."""

    workers: int
    shards: int
    table_writes: float

    @property
    def label(self) -> str:
        heat = "cold" if self.table_writes == COLD else "warm"
        return f"{self.workers} workers, {self.shards} shards, {heat}"


ARMS = (
    Arm(10, 8, COLD),
    Arm(30, 8, COLD),
    Arm(100, 8, COLD),
    Arm(100, 8, WARM),
    Arm(100, 32, WARM),
)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    tasks_per_s: float
    slots_busy: float
    partition_load: float
    table_load: float
    throttled_per_task: float
    calls_per_task: float
    write_units_per_task: float
    usd_per_million: float
    small_s: float
    small_worst_s: float
    solo_s: float
    cpu_s: float

    @property
    def million_h(self) -> float:
        return MILLION / self.tasks_per_s / 3600

    def line(self) -> dict[str, object]:
        return {**msgspec.structs.asdict(self), "limit": self.limit}

    @property
    def limit(self) -> str:
        """What is nearest to its end, and what lifts it."""
        loads = {
            "workers: add some": self.slots_busy,
            "a partition: more shards": self.partition_load,
            "the cold table: warm it": self.table_load,
        }
        return max(loads, key=lambda name: loads[name])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--slots", type=int, default=100, help="pages that a worker has in flight")
    parser.add_argument("--think", type=float, default=5.0, help="seconds that a page takes")
    parser.add_argument(
        "--arms", type=int, default=len(ARMS), help="only so many, small ones first"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # A throttle is no news here: they are counted.
    measured = []
    for arm in ARMS[: options.arms]:
        plan = Plan(
            workers=arm.workers,
            slots=options.slots,
            shards=arm.shards,
            table_writes=arm.table_writes,
            think_s=options.think,
        )
        tell = teller(arm.label)
        clock = MockClock(autojump_threshold=0)
        measured.append(trio.run(measure, arm.label, plan, options.seed, tell, clock=clock))
    show(measured)
    draw_all(measured)
    if options.json:
        print(msgspec.json.encode([each.line() for each in measured]).decode())


def teller(label: str) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{label}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    return tell


async def measure(label: str, plan: Plan, seed: int, tell: Callable[[int, int], None]) -> Measured:
    count = ROUNDS * plan.workers * plan.slots
    began = time.process_time()
    async with a_fleet(plan, seed) as fleet:
        solo_s = await _time(fleet, "alone")
        meter = fleet.meter
        calls, units, usd = meter.calls.total(), meter.write_units, meter.price_millionths
        long = await fleet.submit("long", count, max_inflight=plan.workers * plan.slots)
        small: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_arrive, fleet, small)
            rate, busy, hottest, table = await _drain(fleet, long, count, tell)
        tasks = count + SMALL * len(small)
        return Measured(
            label=label,
            tasks_per_s=rate,
            slots_busy=busy / (plan.workers * plan.slots),
            partition_load=hottest / PARTITION_WRITES,
            table_load=table / plan.table_writes,
            throttled_per_task=fleet.model.fate.fired["dynamodb.throttled"] / tasks,
            calls_per_task=(meter.calls.total() - calls) / tasks,
            write_units_per_task=(meter.write_units - units) / tasks,
            usd_per_million=(meter.price_millionths - usd) / tasks,
            small_s=median(small),
            small_worst_s=max(small),
            solo_s=solo_s,
            cpu_s=time.process_time() - began,
        )


async def _drain(
    fleet: Fleet, job: Accepted, count: int, tell: Callable[[int, int], None]
) -> tuple[float, float, float, float]:
    """Tasks a second in the steady part of it, slots in use, and units a second: of the hottest
    partition, and of all of them."""
    marks: list[tuple[float, int, float, Mapping[Place, float]]] = []
    busy: list[int] = []
    done = 0
    while done < count:
        await trio.sleep(LOOK_S)
        done = await _done(fleet, job)
        tell(done, count)
        if STEADY[0] * count <= done <= STEADY[1] * count:
            written = fleet.written()
            marks.append((trio.current_time(), done, sum(written.values()), written))
            busy.append(fleet.gateway.inflight)
    (began, done_before, units_before, before), (ended, done_after, units_after, after) = (
        marks[0],
        marks[-1],
    )
    seconds = ended - began
    hottest = max(after[name] - before.get(name, 0.0) for name in after)
    return (
        (done_after - done_before) / seconds,
        median(busy),
        hottest / seconds,
        (units_after - units_before) / seconds,
    )


async def _arrive(fleet: Fleet, small: list[float]) -> None:
    """Other callers, one after the other, each with a short list."""
    async with trio.open_nursery() as nursery:
        for number in range(CALLERS):
            nursery.start_soon(_note, fleet, f"caller-{number}", small)
            await trio.sleep(fleet.plan.think_s / 20)


async def _note(fleet: Fleet, caller: str, small: list[float]) -> None:
    small.append(await _time(fleet, caller))


async def _time(fleet: Fleet, caller: str) -> float:
    """How long a short list takes, as its caller sees it."""
    began = trio.current_time()
    job = await fleet.submit(caller, SMALL, max_inflight=SMALL)
    while await _is_live(fleet, job):
        await trio.sleep(LOOK_S / 4)
    return trio.current_time() - began


async def _is_live(fleet: Fleet, job: Accepted) -> bool:
    run = await fleet.env.store.read(RunKey(job.job.job_id, job.run.run_id))
    return run is not None and run.status in RUN_LIVE


async def _done(fleet: Fleet, job: Accepted) -> int:
    run = await fleet.env.store.read(RunKey(job.job.job_id, job.run.run_id))
    assert run is not None
    return (await totals_of(fleet.env, run)).done


def show(measured: Sequence[Measured]) -> None:
    print(
        f"{'':30}{'tasks/s':>8}{'1M in h':>8}{'slots':>7}{'part.':>7}{'table':>7}{'thrtl':>7}"
        f"{'calls':>7}{'units':>7}{'USD/M':>7}{'small':>7}{'solo':>6}  next limit"
    )
    for each in measured:
        print(
            f"{each.label:30}{each.tasks_per_s:>8,.0f}{each.million_h:>8.2f}"
            f"{each.slots_busy:>7.0%}{each.partition_load:>7.0%}{each.table_load:>7.0%}"
            f"{each.throttled_per_task:>7.2f}{each.calls_per_task:>7.2f}"
            f"{each.write_units_per_task:>7.2f}{each.usd_per_million:>7.2f}"
            f"{each.small_s:>6.1f}s{each.solo_s:>5.1f}s  {each.limit}"
        )


def draw_all(measured: Sequence[Measured]) -> None:
    panels = [
        Panel("tasks a second", [(each.label, each.tasks_per_s) for each in measured]),
        Panel("a million in", [(each.label, each.million_h) for each in measured], "h"),
        Panel(
            "the hottest partition, of what it can take",
            [(each.label, 100 * each.partition_load) for each in measured],
            "%",
        ),
        Panel("list price of a million", [(e.label, e.usd_per_million) for e in measured], "USD"),
    ]
    draw(RESULTS / "scale.svg", "Fleets on modelled AWS, one long list and 200 short ones", panels)
