"""Computes the AWS bill of a million tasks, for one list alone and with 200 other callers.

Real workers run in virtual time on modelled AWS, as in `bench scale`, on a table with warm
throughput, and a meter counts every call of every process. Only a part of the million is run
(`--part`); the bill is scaled to a million tasks, and hours follow from the rate. The calls of the
short lists are part of the bill of the shared fleet, and their share grows when the part of the
long list is smaller: compare only bills of the same part. A short job and an idle worker are shown
by step (`python -m bench small_jobs`), and `python -m bench cost_steps` shows the calls of one
worker by step, on local servers.

The same lists are run with CONVEYOR_TASK_STORE=postgres. A task store bills nothing by the call:
its row has what AWS bills, and the price of a database of the stated size by the tasks of a day.
"""

from __future__ import annotations

import argparse
import gc
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import trio

from bench import small_jobs
from bench.fleet import LONG, Fleet, Plan, running_fleet
from bench.reference_design import RECEIVES, reference_steps
from bench.scale import (
    FRESH_MAX,
    WARM,
    WARM_UP_S,
    count_done,
    make_progress_line,
    retry_while_unavailable,
    submit_short_lists,
)
from bench.scale_table import SHORT_LIST_TASKS
from conveyor.engines.aws.client import usage as prices
from conveyor.simulation.deterministic_trio import JumpClock

MILLION = 1_000_000
SHARDS = 8
POLL_S = 0.5

# A worker is a Fargate task of 1 vCPU and 2 GB. USD, us-east-1, Linux on x86.
FARGATE_WORKER_HOUR = 0.04048 + 2 * 0.004445
S3_GB_MONTH = 0.023
# A task store: RDS for PostgreSQL on an instance and its standby in another zone (db.m6g.large, 2
# vCPU and 8 GB), and 100 GB of gp3, which has the rows of 50 million tasks. USD, us-east-1.
DATABASE = "db.m6g.large with a standby, 100 GB"
DATABASE_MONTH = 730 * 0.318 + 100 * 0.23
DAYS_OF_MONTH = 30.4
MILLIONS_A_DAY = (1, 3, 10)
DYNAMODB_GB_MONTH = 0.25


class Usage(msgspec.Struct, frozen=True):
    """The calls, units and dollars of one task, as the bench metered them."""

    calls: Mapping[str, float]
    write_units: float
    read_units: float
    usd: Mapping[str, float]
    row_bytes: float
    tasks_per_s: float

    @property
    def engine_calls(self) -> float:
        """Calls of DynamoDB, SQS and S3."""
        return sum(count for service, count in self.calls.items() if service != "redis")

    @property
    def usd_per_million(self) -> float:
        return sum(self.usd.values())


class Bill(msgspec.Struct, frozen=True):
    """The cost of a design or of a commit: USD for a million tasks, the other figures for one task
    of the fleet."""

    name: str
    alone_usd: float
    usd: float
    calls: float
    write_units: float
    redis_calls: float


# Measured at commit f8b26e8 (bench/results/scale.md): 50 workers, 8 shards, warm, a part of 20,000
# tasks. The bill of one list alone was measured in the same way. At that commit the first claim of
# a task was a write.
BEFORE = Bill("f8b26e8", alone_usd=7.74, usd=10.00, calls=8.62, write_units=5.45, redis_calls=6.62)
SMALL_JOBS, SMALL_WORKERS = 60, 10


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench cost", description=__doc__)
    parser.add_argument("--part", type=int, default=200_000, help="tasks of the long list")
    parser.add_argument("--alone-part", type=int, default=100_000, help="tasks of one list alone")
    parser.add_argument("--workers", type=int, default=50, help="workers of the fleet")
    parser.add_argument("--callers", type=int, default=200, help="callers with a short list")
    parser.add_argument("--slots", type=int, default=40, help="pages that a worker has in flight")
    parser.add_argument("--think", type=float, default=2.0, help="seconds that a page takes")
    parser.add_argument("--page-kb", type=float, default=20.0, help="size of a stored body")
    parser.add_argument("--no-redis", action="store_true", help="keep leases in the table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    gc.set_threshold(FRESH_MAX, 20, 100)
    bills = measure_both(options, has_task_store=False)
    small = partial(
        small_jobs.measure,
        SMALL_WORKERS,
        SMALL_JOBS,
        options.seed,
        has_redis=not options.no_redis,
    )
    small_jobs.show(trio.run(small, clock=JumpClock()), SMALL_WORKERS)
    with_task_store = measure_both(options, has_task_store=True)
    compare(bills, with_task_store, options.workers * options.slots, options.think)
    if options.json:
        print(msgspec.json.encode(line(*bills)).decode())


def measure_both(options: argparse.Namespace, *, has_task_store: bool) -> list[Usage]:
    """Returns the bills of one list alone, and of a fleet."""
    plan = Plan(
        workers=options.workers,
        slots=options.slots,
        shards=SHARDS,
        table_writes=WARM,
        think_s=options.think,
        has_redis=not options.no_redis,
        has_task_store=has_task_store,
    )
    bills = []
    for name, part, callers in (
        ("one list alone", options.alone_part, 0),
        (f"beside {options.callers} callers", options.part, options.callers),
    ):
        used = trio.run(measure, plan, part, callers, options.seed, clock=JumpClock())
        bills.append(used)
        where = ", tasks in Postgres" if has_task_store else ""
        show(name + where, used, plan, part, options.page_kb)
    return bills


async def measure(plan: Plan, part: int, callers: int, seed: int) -> Usage:
    """Runs a part of a long list to its end, and the short lists that are submitted meanwhile."""
    slots = plan.workers * plan.slots
    async with running_fleet(plan, seed) as fleet:
        await trio.sleep(WARM_UP_S)
        before, began_at = snapshot(fleet), trio.current_time()
        small: list[float] = []
        long = await retry_while_unavailable(lambda: fleet.submit(LONG, part, max_inflight=slots))
        async with trio.open_nursery() as nursery:
            if callers:
                gap_s = part * plan.think_s / slots / callers
                nursery.start_soon(submit_short_lists, fleet, callers, gap_s, small)
            show_progress = make_progress_line(f"{plan.workers} workers, {callers} callers")
            while (done := await retry_while_unavailable(lambda: count_done(fleet, long))) < part:
                show_progress(done, part)
                await trio.sleep(POLL_S)
        tasks = part + SHORT_LIST_TASKS * len(small)
        seconds = trio.current_time() - began_at
        return usage_since(before, fleet, tasks, seconds)


def snapshot(fleet: Fleet) -> tuple[Counter[str], dict[str, float]]:
    meter = fleet.meter
    return Counter(meter.calls), {
        "write_units": meter.write_units,
        "read_units": meter.read_units,
        "sqs": meter.sqs_requests,
        "all": meter.price_millionths,
        "rows": fleet.stored_row_bytes(),
    }


def usage_since(
    before: tuple[Counter[str], dict[str, float]], fleet: Fleet, tasks: int, seconds: float
) -> Usage:
    calls_before, sums_before = before
    calls_now, sums_now = snapshot(fleet)
    grown = {name: (sums_now[name] - sums_before[name]) / tasks for name in sums_now}
    by_service: Counter[str] = Counter()
    for name, count in (calls_now - calls_before).items():
        by_service[name.partition(".")[0]] += count
    usd = {
        "DynamoDB writes": grown["write_units"] * prices.WRITE_UNIT,
        "DynamoDB reads": grown["read_units"] * prices.READ_UNIT,
        "SQS": grown["sqs"] * prices.SQS_REQUEST,
    }
    usd["S3 requests"] = grown["all"] - sum(usd.values())
    return Usage(
        calls={service: count / tasks for service, count in sorted(by_service.items())},
        write_units=grown["write_units"],
        read_units=grown["read_units"],
        usd=usd,
        row_bytes=grown["rows"],
        tasks_per_s=tasks / seconds,
    )


def show(name: str, used: Usage, plan: Plan, part: int, page_kb: float) -> None:
    hours = MILLION / used.tasks_per_s / 3600
    print(
        f"\nA million tasks, {name}: {plan.workers} workers with {plan.slots} slots, pages of"
        f" {plan.think_s:g} s; {part:,} were run, {used.tasks_per_s:,.0f} a second"
    )
    for service, count in used.calls.items():
        print(f"  {f'calls of {service}':34}{count:>9.3f} a task")
    print(f"  {'write units':34}{used.write_units:>9.3f} a task")
    print(f"  {'read units':34}{used.read_units:>9.3f} a task")
    for what, usd in used.usd.items():
        print(f"  {what:34}{usd:>9.3f} USD")
    print(f"  {'without hours and storage':34}{used.usd_per_million:>9.3f} USD")
    redis = hours * prices.REDIS_HOUR / 1e6 * plan.has_redis
    print(f"  {f'Redis, 2 nodes for {hours:.2f} h':34}{redis:>9.3f} USD")
    fargate = hours * plan.workers * FARGATE_WORKER_HOUR
    print(f"  {f'Fargate, 1 vCPU and 2 GB, {hours:.2f} h':34}{fargate:>9.3f} USD")
    pages = MILLION * page_kb * 1e3 / 1e9 * S3_GB_MONTH
    print(f"  {f'S3, {page_kb:g} KB a page, a month':34}{pages:>9.3f} USD")
    rows = MILLION * used.row_bytes / 1e9 * DYNAMODB_GB_MONTH
    print(f"  {f'rows, {used.row_bytes:,.0f} bytes a task, a month':34}{rows:>9.3f} USD")
    whole = used.usd_per_million + redis + fargate + pages + rows
    print(f"  {'the whole bill':34}{whole:>9.3f} USD")


def compare(
    bills: Sequence[Usage], with_task_store: Sequence[Usage], inflight: int, page_s: float
) -> None:
    steps = reference_steps(inflight=inflight, page_s=page_s, receives=RECEIVES["mean"])
    reference = Bill(
        "the reference design",
        alone_usd=sum(step.usd_per_million for step in steps),
        usd=sum(step.usd_per_million for step in steps),
        calls=sum(step.calls for step in steps),
        write_units=sum(step.write_units for step in steps),
        redis_calls=0.0,
    )
    ours = bill_of("this commit", *bills)
    mixed = bill_of("tasks in Postgres", *with_task_store)
    print("\nComparison: USD a million without hours and storage, and the fleet's figures per task")
    print(f"{'':24}{'alone':>9}{'fleet':>9}{'calls':>9}{'writes':>9}{'Redis':>9}")
    for one in (reference, BEFORE, ours, mixed):
        print(
            f"  {one.name:22}{one.alone_usd:>9.2f}{one.usd:>9.2f}{one.calls:>9.2f}"
            f"{one.write_units:>9.2f}{one.redis_calls:>9.2f}"
        )

    print(f"\nThe database of a task store, {DATABASE}: {DATABASE_MONTH:.0f} USD a month")
    print(f"{'':24}{'database':>9}{'in all':>9}{'without':>9}   USD a million, of the fleet")
    for millions in MILLIONS_A_DAY:
        database = DATABASE_MONTH / DAYS_OF_MONTH / millions
        print(
            f"  {f'{millions} million tasks a day':22}{database:>9.2f}{mixed.usd + database:>9.2f}"
            f"{ours.usd:>9.2f}"
        )


def bill_of(name: str, alone: Usage, fleet: Usage) -> Bill:
    return Bill(
        name,
        alone_usd=alone.usd_per_million,
        usd=fleet.usd_per_million,
        calls=fleet.engine_calls,
        write_units=fleet.write_units,
        redis_calls=fleet.calls.get("redis", 0.0),
    )


def line(alone: Usage, fleet: Usage) -> dict[str, float]:
    return {
        "alone_usd": round(alone.usd_per_million, 3),
        "fleet_usd": round(fleet.usd_per_million, 3),
        "calls": round(fleet.engine_calls, 3),
        "write_units": round(fleet.write_units, 3),
        "redis_calls": round(fleet.calls.get("redis", 0.0), 3),
    }
