"""Finds which resource limits a fleet next, and which change raises that limit.

Real workers run in virtual time on a model of AWS with the documented limits of DynamoDB: a
thousand write units a second per partition, four thousand for a new (cold) table. One caller has a
long list, hundreds of others have a short list each. The rate of the whole long list is estimated
from a part of it; `--part 0` runs all of it. The results of each fleet are stored in `scale.json`;
the table and the figure show all stored fleets.
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

from bench.fleet import LONG, Fleet, Plan, running_fleet
from bench.scale_table import (
    COLD,
    PARTITION_WRITES,
    SHORT_LIST_TASKS,
    Arm,
    Measured,
    keep,
    show,
    write_all,
)
from conveyor.domain.changes import RunKey
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.ports.errors import Unavailable
from conveyor.simulation.deterministic_trio import JumpClock
from conveyor.simulation.models.dynamodb.capacity import Place
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.submit.jobs import Accepted

WARM = 40_000.0
# Enough tasks for a steady rate: filling the slots and the last pages are a small part of it.
PART = 100_000
ROUNDS_MIN = 3
POLL_S = 0.5
# After this time all workers are in the roster of each other, and know which runs they own.
WARM_UP_S = 20.0
# The share of tasks between which rates are measured: the slots fill up before, and run dry after.
STEADY = (0.25, 0.75)
# Almost all objects of a simulation live long, so the garbage collector runs less often.
FRESH_MAX = 100_000

ARMS = (
    Arm(10, 8, COLD),
    Arm(50, 8, COLD),
    Arm(50, 8, WARM),
    Arm(100, 8, COLD),
    Arm(100, 8, WARM),
)

T = TypeVar("T")
ShowProgress = Callable[[int, int], None]


class Load(msgspec.Struct, frozen=True):
    """The lists of all callers: a long one, of which a part is run, and short ones."""

    tasks: int
    part_min: int
    callers: int

    def part(self, plan: Plan) -> int:
        """Returns how many pages of the long list to run: some rounds for each slot, and at least
        `part_min`; all if `part_min` is 0."""
        if not self.part_min:
            return self.tasks
        return min(self.tasks, max(self.part_min, ROUNDS_MIN * plan.workers * plan.slots))


class Sample(msgspec.Struct, frozen=True):
    """The counters of the fleet at one instant."""

    at: float
    served: int
    inflight: int
    written: Counter[Place]


def main(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    logging.disable(
        logging.WARNING
    )  # Throttled calls are counted, so their warnings are not shown.
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
        show_progress = make_progress_line(arm.label)
        measured.append(
            trio.run(measure, plan, load, options.seed, show_progress, clock=JumpClock())
        )
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
    parser.add_argument("--arm", type=int, action="append", help=f"run only this arm ({numbered})")
    parser.add_argument("--tasks", type=int, default=1_000_000, help="pages in the long list")
    parser.add_argument(
        "--part", type=int, default=PART, help="run at least this many of its pages; 0 runs all"
    )
    parser.add_argument("--callers", type=int, default=200, help="callers with a short list")
    parser.add_argument("--slots", type=int, default=40, help="pages that a worker has in flight")
    parser.add_argument("--think", type=float, default=2.0, help="seconds that a page takes")
    parser.add_argument("--workers", type=int, help="another number of workers; stores no results")
    parser.add_argument(
        "--table-writes", type=float, help="write units a second; stores no results"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def make_progress_line(label: str) -> ShowProgress:
    def show_progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{label}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    return show_progress


async def measure(plan: Plan, load: Load, seed: int, show_progress: ShowProgress) -> Measured:
    count = load.part(plan)
    began = time.process_time()
    async with running_fleet(plan, seed) as fleet:
        await trio.sleep(WARM_UP_S)
        solo_s = await _time_short_list(fleet, "alone")
        meter, fired = fleet.meter, fleet.model.fault_source.fault_counts
        calls, units, usd = Counter(meter.calls), meter.write_units, meter.price_millionths
        served, throttled = fleet.gateway.served, fired["dynamodb.throttled"]
        slots = plan.workers * plan.slots
        long = await retry_while_unavailable(lambda: fleet.submit(LONG, count, max_inflight=slots))
        small: list[float] = []
        async with trio.open_nursery() as nursery:
            gap_s = count * plan.think_s / slots / load.callers
            nursery.start_soon(submit_short_lists, fleet, load.callers, gap_s, small)
            samples = await _drain(fleet, long, count, slots, show_progress)
        tasks = count + SHORT_LIST_TASKS * len(small)
        first, last = samples[0], samples[-1]
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
            slots_busy=median(sample.inflight for sample in samples) / slots,
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
    """Names a partition by its kind: an index by its name, a shard by the kind of its rows."""
    index, partition = place
    return index or partition.split("#")[0] + ("#shard" if partition.count("#") > 1 else "")


def _most_of_a_table(written: Counter[Place]) -> float:
    """Returns the units of the table or the index that used most: each has its own limit."""
    whole: Counter[str] = Counter()
    for (name, _), units in written.items():
        whole[name] += units
    return max(whole.values())


def _by_service(calls: Counter[str], tasks: int) -> dict[str, float]:
    by_service: Counter[str] = Counter()
    for name, count in calls.items():
        by_service[name.split(".")[0]] += count
    return {name: count / tasks for name, count in sorted(by_service.items())}


async def _drain(
    fleet: Fleet, job: Accepted, count: int, slots: int, show_progress: ShowProgress
) -> list[Sample]:
    """Waits until `count` tasks have ended. Returns the samples of the steady part, in which every
    slot still had a task to take."""
    samples: list[Sample] = []
    done, steady_max = 0, min(STEADY[1] * count, count - slots)
    while done < count:
        await trio.sleep(POLL_S)
        done = await retry_while_unavailable(lambda: count_done(fleet, job))
        show_progress(done, count)
        if done >= STEADY[0] * count and (len(samples) < 2 or done <= steady_max):
            gateway, written = fleet.gateway, Counter(fleet.written_units())
            samples.append(Sample(trio.current_time(), gateway.served, gateway.inflight, written))
    return samples


async def submit_short_lists(fleet: Fleet, callers: int, gap_s: float, small: list[float]) -> None:
    """Submits the short lists of other callers, one every `gap_s`, and waits until they end."""
    async with trio.open_nursery() as nursery:
        for number in range(callers):
            nursery.start_soon(_append_duration, fleet, f"caller-{number}", small)
            await trio.sleep(gap_s)


async def _append_duration(fleet: Fleet, caller: str, small: list[float]) -> None:
    small.append(await _time_short_list(fleet, caller))


async def _time_short_list(fleet: Fleet, caller: str) -> float:
    """Returns the seconds from a caller's submit of a short list until the caller sees its end."""
    began = trio.current_time()
    job = await retry_while_unavailable(
        lambda: fleet.submit(caller, SHORT_LIST_TASKS, max_inflight=SHORT_LIST_TASKS)
    )
    while await retry_while_unavailable(lambda: _is_live(fleet, job)):
        await trio.sleep(POLL_S)
    return trio.current_time() - began


async def retry_while_unavailable(ask: Callable[[], Awaitable[T]]) -> T:
    """Calls `ask` until the store is available, as a client repeats a request."""
    while True:
        try:
            return await ask()
        except Unavailable:
            await trio.sleep(POLL_S)


async def _is_live(fleet: Fleet, job: Accepted) -> bool:
    run = await fleet.unmetered.store.read(RunKey(job.job.job_id, job.run.run_id))
    return run is not None and run.status in RUN_LIVE


async def count_done(fleet: Fleet, job: Accepted) -> int:
    run = await fleet.unmetered.store.read(RunKey(job.job.job_id, job.run.run_id))
    assert run is not None
    return (await totals_of(fleet.unmetered, run)).done
