"""Where is the next limit of a fleet, and what lifts it?

The real workers run in virtual time on modelled AWS, which takes no more than AWS says it does: a
thousand write units a second and partition, four thousand on a cold table. One caller has a long
list, hundreds of others a short one each. A part of the long list tells how fast all of it would
go; `--part 0` runs all of it. Fleets are kept in `scale.json` as they are measured, and the
table and the figure show all that are kept.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TypeVar

import msgspec
import trio

from bench.fleet import LONG, Fleet, Plan, a_fleet
from bench.scale_table import COLD, PARTITION_WRITES, SMALL, Arm, Measured, keep, show, write_all
from conveyor.domain.changes import RunKey
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.ports.errors import Unavailable
from conveyor.simulation.deterministic_trio import JumpClock
from conveyor.simulation.models.dynamodb.capacity import Place
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.submit.jobs import Accepted

WARM = 40_000.0
PART = 100_000
ROUNDS_MIN = 3
LOOK_S = 0.5
# Until then all workers have seen one another, and know which runs they own.
WARM_UP_S = 20.0
STEADY = (0.25, 0.75)  # Filling up and running dry tell nothing about a long list.
FRESH_MAX = 100_000  # Nearly all that lives here lives long: the dead are looked for less often.

ARMS = (
    Arm(10, 8, COLD),
    Arm(50, 8, COLD),
    Arm(50, 8, WARM),
    Arm(100, 8, COLD),
    Arm(100, 8, WARM),
)

T = TypeVar("T")
Tell = Callable[[int, int], None]


class Load(msgspec.Struct, frozen=True):
    """What callers bring: a long list of which a part is run, and short ones."""

    tasks: int
    part_min: int
    callers: int

    def part(self, plan: Plan) -> int:
        """As many pages as make some rounds for each slot, and at least `part_min`; 0 means all."""
        if not self.part_min:
            return self.tasks
        return min(self.tasks, max(self.part_min, ROUNDS_MIN * plan.workers * plan.slots))


class Mark(msgspec.Struct, frozen=True):
    """What had happened by an instant."""

    at: float
    served: int
    inflight: int
    written: Counter[Place]


def main(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    logging.disable(logging.WARNING)  # A throttle is no news here: they are counted.
    gc.set_threshold(FRESH_MAX, 20, 100)
    load = Load(options.tasks, options.part, options.callers)
    is_kept = not (options.workers or options.table_writes)
    measured = []
    for arm in ARMS if options.arm is None else [ARMS[number - 1] for number in options.arm]:
        plan = Plan(
            workers=options.workers or arm.workers,
            slots=options.slots,
            shards=arm.shards,
            table_writes=options.table_writes or arm.table_writes,
            think_s=options.think,
        )
        tell = teller(arm.label)
        measured.append(trio.run(measure, plan, load, options.seed, tell, clock=JumpClock()))
        if is_kept:
            keep(measured[-1])
    show(measured)
    if is_kept:
        write_all([arm.label for arm in ARMS])
    if options.json:
        print(msgspec.json.encode([result.line() for result in measured]).decode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    numbered = ", ".join(f"{number}: {arm.label}" for number, arm in enumerate(ARMS, 1))
    parser.add_argument("--arm", type=int, action="append", help=f"only this one ({numbered})")
    parser.add_argument("--tasks", type=int, default=1_000_000, help="pages in the long list")
    parser.add_argument(
        "--part", type=int, default=PART, help="run so many pages of it at least; 0 runs them all"
    )
    parser.add_argument("--callers", type=int, default=200, help="those with a short list")
    parser.add_argument("--slots", type=int, default=40, help="pages that a worker has in flight")
    parser.add_argument("--think", type=float, default=2.0, help="seconds that a page takes")
    parser.add_argument("--workers", type=int, help="another number, for a try: nothing is kept")
    parser.add_argument("--table-writes", type=float, help="write units a second; nothing is kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def teller(label: str) -> Tell:
    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{label}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    return tell


async def measure(plan: Plan, load: Load, seed: int, tell: Tell) -> Measured:
    count = load.part(plan)
    began = time.process_time()
    async with a_fleet(plan, seed) as fleet:
        await trio.sleep(WARM_UP_S)
        solo_s = await _time(fleet, "alone")
        meter, fired = fleet.meter, fleet.model.fault_source.fired
        calls, units, usd = Counter(meter.calls), meter.write_units, meter.price_millionths
        served, throttled = fleet.gateway.served, fired["dynamodb.throttled"]
        slots = plan.workers * plan.slots
        long = await insist(lambda: fleet.submit(LONG, count, max_inflight=slots))
        small: list[float] = []
        async with trio.open_nursery() as nursery:
            gap_s = count * plan.think_s / slots / load.callers
            nursery.start_soon(arrive, fleet, load.callers, gap_s, small)
            marks = await _drain(fleet, long, count, slots, tell)
        tasks = count + SMALL * len(small)
        first, last = marks[0], marks[-1]
        seconds = last.at - first.at
        grown = last.written - first.written
        (hottest, hottest_units), *_ = grown.most_common(1)
        return Measured(
            label=Arm(plan.workers, plan.shards, plan.table_writes).label,
            tasks=load.tasks,
            part=count,
            callers=load.callers + 1,
            slots=plan.slots,
            think_s=plan.think_s,
            tasks_per_s=(last.served - first.served) / seconds,
            slots_busy=median(mark.inflight for mark in marks) / slots,
            partition_load=hottest_units / seconds / PARTITION_WRITES,
            hottest=_kind(hottest),
            table_load=_most_of_a_table(grown) / seconds / plan.table_writes,
            throttled_per_task=(fired["dynamodb.throttled"] - throttled) / tasks,
            calls_per_task=_by_service(Counter(meter.calls) - calls, tasks),
            write_units_per_task=(meter.write_units - units) / tasks,
            usd_per_million=(meter.price_millionths - usd) / tasks,
            fetched_twice=fleet.gateway.served - served - tasks,
            small_s=median(small),
            small_worst_s=max(small),
            solo_s=solo_s,
            cpu_s=time.process_time() - began,
        )


def _kind(place: Place) -> str:
    """A partition by what it holds: an index by its name, a shard as such."""
    index, partition = place
    return index or partition.split("#")[0] + ("#shard" if partition.count("#") > 1 else "")


def _most_of_a_table(written: Counter[Place]) -> float:
    """Units of the table or of the index that took most: each has an end of its own."""
    whole: Counter[str] = Counter()
    for (name, _), units in written.items():
        whole[name] += units
    return max(whole.values())


def _by_service(calls: Counter[str], tasks: int) -> dict[str, float]:
    by_service: Counter[str] = Counter()
    for name, count in calls.items():
        by_service[name.split(".")[0]] += count
    return {name: count / tasks for name, count in sorted(by_service.items())}


async def _drain(fleet: Fleet, job: Accepted, count: int, slots: int, tell: Tell) -> list[Mark]:
    """Waits for the end of it, and answers what was seen in its steady part: while there was
    something left for every slot."""
    marks: list[Mark] = []
    done, steady_max = 0, min(STEADY[1] * count, count - slots)
    while done < count:
        await trio.sleep(LOOK_S)
        done = await insist(lambda: count_done(fleet, job))
        tell(done, count)
        if done >= STEADY[0] * count and (len(marks) < 2 or done <= steady_max):
            gateway, written = fleet.gateway, Counter(fleet.written_units())
            marks.append(Mark(trio.current_time(), gateway.served, gateway.inflight, written))
    return marks


async def arrive(fleet: Fleet, callers: int, gap_s: float, small: list[float]) -> None:
    """Other callers, one after the other, each with a short list."""
    async with trio.open_nursery() as nursery:
        for number in range(callers):
            nursery.start_soon(_note, fleet, f"caller-{number}", small)
            await trio.sleep(gap_s)


async def _note(fleet: Fleet, caller: str, small: list[float]) -> None:
    small.append(await _time(fleet, caller))


async def _time(fleet: Fleet, caller: str) -> float:
    """How long a short list takes, as its caller sees it."""
    began = trio.current_time()
    job = await insist(lambda: fleet.submit(caller, SMALL, max_inflight=SMALL))
    while await insist(lambda: _is_live(fleet, job)):
        await trio.sleep(LOOK_S)
    return trio.current_time() - began


async def insist(ask: Callable[[], Awaitable[T]]) -> T:
    """As clients do: who is told that the table is too busy asks again."""
    while True:
        try:
            return await ask()
        except Unavailable:
            await trio.sleep(LOOK_S)


async def _is_live(fleet: Fleet, job: Accepted) -> bool:
    run = await fleet.watch.store.read(RunKey(job.job.job_id, job.run.run_id))
    return run is not None and run.status in RUN_LIVE


async def count_done(fleet: Fleet, job: Accepted) -> int:
    run = await fleet.watch.store.read(RunKey(job.job.job_id, job.run.run_id))
    assert run is not None
    return (await totals_of(fleet.watch, run)).done
