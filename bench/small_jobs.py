"""Measures what a job of ten tasks costs on AWS, and what an idle worker costs, by step.

Real workers run in virtual time on modelled AWS, as in `bench cost`. The idle fleet is metered
first, for ten minutes. Then one short job is submitted every second, and the calls that the idle
fleet would have made in that time are subtracted. Each caller has one job, so each job also creates
an event log.
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

from bench.fleet import Plan, running_fleet
from bench.scale import FRESH_MAX, WARM, submit_short_lists
from bench.scale_table import SHORT_LIST_TASKS
from conveyor.engines.aws.client.usage import Meter, Usage
from conveyor.simulation.deterministic_trio import JumpClock

# After this time all workers are in the roster of each other, and no call of the start is left.
SETTLED_S = 120.0
IDLE_S = 600.0
# The time in which a job's queue is deleted and the sweeper visits its row.
AFTER_S = 60.0
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
    """Counts each call for a step, which it derives from the kinds of rows in the call."""

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
    """`idle` is the usage of one worker in an hour without work. `job` is the usage of one job of
    ten tasks, without that of the idle fleet. `seconds` is the duration of such a job."""

    idle: Mapping[str, Usage]
    job: Mapping[str, Usage]
    seconds: float


async def measure(workers: int, jobs: int, seed: int, *, has_redis: bool = True) -> SmallJobs:
    plan = Plan(
        workers=workers, slots=40, shards=8, table_writes=WARM, think_s=2.0, has_redis=has_redis
    )
    meter = SteppedMeter()
    async with running_fleet(plan, seed, meter) as fleet:
        await trio.sleep(SETTLED_S)
        before = meter.snapshot()
        await trio.sleep(IDLE_S)
        idle = _minus(meter.snapshot(), before)
        before, began_at = meter.snapshot(), trio.current_time()
        seconds: list[float] = []
        await submit_short_lists(fleet, jobs, GAP_S, seconds)
        await trio.sleep(AFTER_S)
        elapsed_s = trio.current_time() - began_at
        busy = _minus(meter.snapshot(), before)
    background = _scaled(idle, elapsed_s / IDLE_S)
    return SmallJobs(
        idle=_scaled(idle, 3600 / IDLE_S / workers),
        job=_scaled(_minus(busy, background), 1 / jobs),
        seconds=median(seconds),
    )


def _minus(first: Mapping[str, Usage], second: Mapping[str, Usage]) -> dict[str, Usage]:
    return _combined(first, second, lambda one, other: one - other)


def _scaled(first: Mapping[str, Usage], factor: float) -> dict[str, Usage]:
    return _combined(first, {}, lambda one, _: one * factor)


def _combined(
    first: Mapping[str, Usage],
    second: Mapping[str, Usage],
    combine: Callable[[float, float], Any],
) -> dict[str, Usage]:
    names = [*first, *(name for name in second if name not in first)]
    pairs = {name: (first.get(name, Usage()), second.get(name, Usage())) for name in names}
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
    print(f"\nOne idle worker of {workers}, in an hour:")
    _show_steps(measured.idle)
    print(
        f"\nA job of {SHORT_LIST_TASKS} tasks on {workers} workers, its tasks included:"
        f" {measured.seconds:.1f} s with pages of 2 s"
    )
    _show_steps(measured.job)


def _show_steps(steps: Mapping[str, Usage]) -> None:
    print(f"{'calls':>28}{'writes':>9}{'reads':>9}{'USD/1M':>10}")
    printed_steps = {
        name: steps[name] for name in STEPS if abs(steps.get(name, Usage()).calls) >= 0.005
    }
    uses = printed_steps.values()
    total = Usage(
        sum(use.calls for use in uses),
        sum(use.read_units for use in uses),
        sum(use.write_units for use in uses),
        sum(use.price_millionths for use in uses),
    )
    for name, use in {**printed_steps, "total": total}.items():
        print(
            f"  {name:18}{use.calls:>8.2f}{use.write_units:>9.2f}{use.read_units:>9.2f}"
            f"{use.price_millionths:>10.1f}"
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench small_jobs", description=__doc__)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--no-redis", action="store_true", help="keep leases in the table")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    gc.set_threshold(FRESH_MAX, 20, 100)
    run = partial(
        measure, options.workers, options.jobs, options.seed, has_redis=not options.no_redis
    )
    measured = trio.run(run, clock=JumpClock())
    show(measured, options.workers)
