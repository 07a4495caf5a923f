"""What does a job of ten tasks cost beyond its tasks, and what does a fleet cost that has no work?

Real workers run in virtual time on modelled AWS, as in `bench cost`. The idle fleet is metered
first, for ten minutes. Then short jobs come one a second; what the idle fleet would have asked for
meanwhile is subtracted. Each caller has one job, so each job starts an event log too.
"""

from __future__ import annotations

import argparse
import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import trio

from bench.fleet import Plan, a_fleet
from bench.scale import FRESH_MAX, WARM, arrive
from bench.scale_table import SMALL
from conveyor.engines.aws.client.usage import Meter, Usage
from conveyor.simulation.deterministic_trio import JumpClock

SETTLED_S = 120.0  # All workers have seen one another, and nothing of the start is under way.
IDLE_S = 600.0
AFTER_S = 60.0  # What follows a job: its queue is removed, its row is visited by the sweeper.
GAP_S = 1.0

STEPS = (
    "create",
    "number events",
    "queue",
    "send",
    "receive",
    "read tasks",
    "store pages",
    "settle",
    "acknowledge",
    "end",
    "read job and run",
    "look for work",
    "redis",
)
_OF_OPERATION = {
    "sqs.CreateQueue": "queue",
    "sqs.GetQueueUrl": "queue",
    "sqs.DeleteQueue": "queue",
    "sqs.SendMessageBatch": "send",
    "sqs.DeleteMessageBatch": "acknowledge",
    "s3.PutObject": "store pages",
    "dynamodb.Query": "look for work",
}


@dataclass(slots=True)
class SteppedMeter(Meter):
    """Counts each call for what it is made for, by the kinds of rows that it names."""

    by_step: defaultdict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))

    def count(
        self, service: str, operation: str, params: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> None:
        reads, writes, price = self.read_units, self.write_units, self.price_millionths
        Meter.count(self, service, operation, params, answer)
        usage = self.by_step[_step_of(service, operation, params)]
        usage.calls += 1
        usage.read_units += self.read_units - reads
        usage.write_units += self.write_units - writes
        usage.price_millionths += self.price_millionths - price

    def count_redis(self, command: str) -> None:
        Meter.count_redis(self, command)
        self.by_step["redis"].calls += 1

    def snapshot(self) -> dict[str, Usage]:
        return {
            name: Usage(use.calls, use.read_units, use.write_units, use.price_millionths)
            for name, use in self.by_step.items()
        }


def _step_of(service: str, operation: str, params: Mapping[str, Any]) -> str:
    step = _OF_OPERATION.get(f"{service}.{operation}")
    if step is not None:
        return step
    if service != "dynamodb":
        return "receive"
    kinds = set(_kinds_in(params))
    if "Feed" in kinds or kinds == {"Event"}:
        return "number events"
    if operation == "TransactWriteItems" and "Job" in kinds:
        return "create" if "Task" in kinds else "end"
    if "Stats" in kinds and "Job" not in kinds:
        return "settle"
    if "Task" in kinds:
        return "read tasks"
    return "end" if operation == "UpdateItem" else "read job and run"


def _kinds_in(params: Mapping[str, Any]) -> Iterator[str]:
    for key in _keys_in(params):
        yield key["sk"]["S"].partition("#")[0]


def _keys_in(params: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "Key" in params:
        yield params["Key"]
    for step in params.get("TransactItems", ()):
        for write in step.values():
            yield write.get("Key") or write["Item"]
    for request in params.get("RequestItems", {}).values():
        if isinstance(request, Mapping):
            yield from request["Keys"]


@dataclass(frozen=True, slots=True)
class SmallJobs:
    """`idle` is by the hour of one worker, `job` is one job of ten tasks without what an idle fleet
    costs; `seconds` is how long such a job takes."""

    idle: Mapping[str, Usage]
    job: Mapping[str, Usage]
    seconds: float


async def measure(workers: int, jobs: int, seed: int, *, has_redis: bool = True) -> SmallJobs:
    plan = Plan(
        workers=workers, slots=40, shards=8, table_writes=WARM, think_s=2.0, has_redis=has_redis
    )
    meter = SteppedMeter()
    async with a_fleet(plan, seed, meter) as fleet:
        await trio.sleep(SETTLED_S)
        before = meter.snapshot()
        await trio.sleep(IDLE_S)
        idle = _minus(meter.snapshot(), before)
        before, began_at = meter.snapshot(), trio.current_time()
        seconds: list[float] = []
        await arrive(fleet, jobs, GAP_S, seconds)
        await trio.sleep(AFTER_S)
        elapsed_s = trio.current_time() - began_at
        busy = _minus(meter.snapshot(), before)
    background = _scaled(idle, elapsed_s / IDLE_S)
    return SmallJobs(
        idle=_scaled(idle, 3600 / IDLE_S / workers),
        job=_scaled(_minus(busy, background), 1 / jobs),
        seconds=median(seconds),
    )


def _minus(some: Mapping[str, Usage], others: Mapping[str, Usage]) -> dict[str, Usage]:
    return _combined(some, others, lambda one, other: one - other)


def _scaled(some: Mapping[str, Usage], factor: float) -> dict[str, Usage]:
    return _combined(some, {}, lambda one, _: one * factor)


def _combined(
    some: Mapping[str, Usage],
    others: Mapping[str, Usage],
    combine: Callable[[float, float], Any],
) -> dict[str, Usage]:
    names = [*some, *(name for name in others if name not in some)]
    pairs = {name: (some.get(name, Usage()), others.get(name, Usage())) for name in names}
    return {
        name: Usage(
            combine(one.calls, other.calls),
            combine(one.read_units, other.read_units),
            combine(one.write_units, other.write_units),
            combine(one.price_millionths, other.price_millionths),
        )
        for name, (one, other) in pairs.items()
    }


def show(measured: SmallJobs, workers: int) -> None:
    print(f"\nOne worker of {workers} without work, an hour:")
    _show_steps(measured.idle)
    print(
        f"\nA job of {SMALL} tasks on {workers} workers, its tasks included:"
        f" {measured.seconds:.1f} s with pages of 2 s"
    )
    _show_steps(measured.job)


def _show_steps(steps: Mapping[str, Usage]) -> None:
    print(f"{'calls':>28}{'writes':>9}{'reads':>9}{'USD/1M':>10}")
    shown = {name: steps[name] for name in STEPS if abs(steps.get(name, Usage()).calls) >= 0.005}
    uses = shown.values()
    together = Usage(
        sum(use.calls for use in uses),
        sum(use.read_units for use in uses),
        sum(use.write_units for use in uses),
        sum(use.price_millionths for use in uses),
    )
    for name, use in {**shown, "together": together}.items():
        print(
            f"  {name:18}{use.calls:>8.2f}{use.write_units:>9.2f}{use.read_units:>9.2f}"
            f"{use.price_millionths:>10.1f}"
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench small_jobs", description=__doc__)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--no-redis", action="store_true", help="with leases in the table")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    gc.set_threshold(FRESH_MAX, 20, 100)
    run = partial(
        measure, options.workers, options.jobs, options.seed, has_redis=not options.no_redis
    )
    measured = trio.run(run, clock=JumpClock())
    show(measured, options.workers)
