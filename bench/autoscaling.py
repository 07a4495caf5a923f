"""Compares metrics by which workers can be scaled: drain time and worker-hours of each rule.

Real workers run in virtual time on models of AWS and Redis. A controller decides once a minute, as
AWS target tracking does: it adds workers after 3 values above the target and removes workers after
15 values below nine tenths of it. A new worker needs a minute to start. A removed worker drains, as
on SIGTERM. Each rule reads only what it could read on AWS.

The load is divided by the same number as the slots of a worker, so drain times and worker-hours are
those of the full load: `--scale 20` runs 50,000 pages instead of a million, on workers with 10
slots instead of 200. Without it each load has its own scale; all of them take about 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from actors.demand_reporter import DemandReporter
from actors.runtime import Child
from bench.fleet import (
    EPOCH_S,
    Fleet,
    MeteredRedis,
    Plan,
    SlowGateway,
    make_aws_client,
    open_worker,
)
from bench.scale import retry_while_unavailable
from conveyor.bootstrap.aws import names_of
from conveyor.bootstrap.runtime import Runtime
from conveyor.domain.changes import RunKey
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.engine import build_engine, check_resources
from conveyor.engines.system import VirtualClock
from conveyor.simulation.deterministic_trio import JumpClock
from conveyor.simulation.models import AwsModel, FaultSource
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.submit.jobs import Accepted

SLOTS, THINK_S = 200, 2.0
MIN, MAX = 2, 10
PERIOD_S, START_S = 60.0, 60.0
# CPU seconds of one page, measured in a worker on AWS, divided by one vCPU.
PAGE_CPU_S = 0.0012
# A backlog per worker that one worker drains in five minutes.
BACKLOG_TARGET = SLOTS / THINK_S * 300
OUT_VALUES, IN_VALUES = 3, 15
OUT_COOLDOWN_S, IN_COOLDOWN_S = 180.0, 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs of equal length, all submitted when the measurement begins."""

    name: str
    jobs: int
    pages: int
    cap: int
    scale: int


LOADS = (
    Load("a million pages, cap 10,000", 1, 1_000_000, 10_000, 200),
    # A tenth of a cap of 1 would be no slot: with scale 100 the cap of 100 is still one slot.
    Load("a million pages, default cap 100", 1, 1_000_000, 100, 100),
    Load("2,000 jobs of 100 pages", 2_000, 100, 100, 50),
)


@dataclass(slots=True)
class Worker:
    world: Runtime
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_draining: bool = False


@dataclass(slots=True)
class FleetState:
    """The state of the fleet. The scaling rules read it."""

    scale: int
    gateway: SlowGateway
    remaining: int = 0
    workers: list[Worker] = field(default_factory=list)
    lines: deque[str] = field(default_factory=deque)
    served_before: int = 0
    starting: int = 0

    @property
    def active(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.is_draining]


def demand_ratio(state: FleetState) -> float:
    """Returns the mean demand that the workers reported, as a ratio to its target of 80 percent."""
    values = [json.loads(line)["DemandPercent"] for line in state.lines]
    state.lines.clear()
    return sum(values) / len(values) / 80 if values else 0.0


def backlog_ratio(state: FleetState) -> float:
    """Returns the tasks remaining per worker, as a ratio to the backlog that a worker may have."""
    return state.remaining * state.scale / len(state.active) / BACKLOG_TARGET


def cpu_ratio(state: FleetState) -> float:
    """Returns the CPU use of a worker, as a ratio to its target of 60 percent."""
    served = (state.gateway.served - state.served_before) * state.scale
    state.served_before = state.gateway.served
    return served * PAGE_CPU_S / PERIOD_S / len(state.active) / 0.6


def slots_ratio(state: FleetState) -> float:
    """Returns the share of slots in use, as a ratio to its target of 80 percent."""
    limiters = [worker.world.limiter for worker in state.active]
    return (
        sum(limiter.inflight_count / limiter.slots_count for limiter in limiters)
        / len(limiters)
        / 0.8
    )


RULES: dict[str, Callable[[FleetState], float]] = {
    "demand": demand_ratio,
    "backlog": backlog_ratio,
    "CPU": cpu_ratio,
    "slots in use": slots_ratio,
}


@dataclass(slots=True)
class TargetTracking:
    """Decides the number of workers. `ratios` are metric / target of each minute, newest last."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=IN_VALUES))
    free_at: float = 0.0

    def decide(self, count: int, ratio: float, now: float) -> int:
        self.ratios.append(ratio)
        recent = list(self.ratios)[-OUT_VALUES:]
        workers_count = min(MAX, max(MIN, math.ceil(count * ratio)))
        if now < self.free_at:
            return count
        if workers_count > count and len(recent) == OUT_VALUES and min(recent) > 1:
            self.free_at = now + OUT_COOLDOWN_S
            return workers_count
        if workers_count < count and len(self.ratios) == IN_VALUES and max(self.ratios) < 0.9:
            self.free_at = now + IN_COOLDOWN_S
            return workers_count
        return count


@dataclass(frozen=True, slots=True)
class Measured:
    worker_hours: float
    drain_s: float
    workers_most: int
    full_after_s: float | None
    refetched: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True)
class Bench:
    """One fleet under one rule, from its start until it is back at its minimum size."""

    load: Load
    rule: Callable[[FleetState], float]
    scale: int
    randomness: random.Random
    plan: Plan
    model: AwsModel
    redis: MeteredRedis
    state: FleetState
    meter: Meter = field(default_factory=Meter)

    @property
    def jobs(self) -> int:
        return max(1, self.load.jobs // self.scale)

    # A load of one job is scaled by the length of the job, a load of many jobs by their number.
    @property
    def pages(self) -> int:
        return self.load.pages // self.scale if self.load.jobs == 1 else self.load.pages

    @property
    def cap(self) -> int:
        return max(1, self.load.cap // self.scale) if self.load.jobs == 1 else self.load.cap

    async def run(self) -> Measured:
        began = time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(MIN):
                await nursery.start(self._work)
            fleet = await self._fleet()
            jobs = [
                await retry_while_unavailable(
                    partial(fleet.submit, f"caller-{n % 40}", self.pages, max_inflight=self.cap)
                )
                for n in range(self.jobs)
            ]
            result = await self._control(nursery, fleet, jobs)
            nursery.cancel_scope.cancel()
        return replace(
            result,
            refetched=self.state.gateway.served - self.jobs * self.pages,
            cpu_s=time.process_time() - began,
        )

    async def _fleet(self) -> Fleet:
        first, names = self.state.workers[0].world, names_of(self.plan.settings)
        client = make_aws_client(self.model, self.randomness, Meter())
        unmetered = await build_engine(
            client, self.model, names, clock=first.env.clock, random=self.randomness
        )
        return Fleet(
            plan=self.plan,
            model=self.model,
            meter=self.meter,
            gateway=self.state.gateway,
            env=first.env,
            unmetered=replace(first.env, store=unmetered.store),
        )

    async def _control(self, nursery: trio.Nursery, fleet: Fleet, jobs: list[Accepted]) -> Measured:
        state, tracking = self.state, TargetTracking()
        started_at, hours, workers_most = trio.current_time(), 0.0, MIN
        full_after_s = drain_s = None
        state.lines.clear()  # Discard what the idle fleet reported.
        while drain_s is None or len(state.active) > MIN or state.starting:
            await trio.sleep(PERIOD_S)
            hours += len(state.workers) * PERIOD_S / 3600
            state.remaining = await count_remaining(fleet, jobs)
            elapsed_s = trio.current_time() - started_at
            if not state.remaining and drain_s is None:
                drain_s = elapsed_s
            workers_most = max(workers_most, len(state.active))
            if len(state.active) == MAX and full_after_s is None:
                full_after_s = elapsed_s
            workers_count = tracking.decide(len(state.active), self.rule(state), elapsed_s)
            for _ in range(workers_count - len(state.active) - state.starting):
                nursery.start_soon(self._start_later, nursery)
            # The first worker also serves the calls of this bench, so it is never removed.
            for worker in state.active[workers_count:]:
                nursery.start_soon(self._drain, worker)
        return Measured(hours, drain_s, workers_most, full_after_s)

    async def _work(self, *, task_status: trio.TaskStatus[None]) -> None:
        state, client = self.state, make_aws_client(self.model, self.randomness, self.meter)
        async with open_worker(
            self.plan, client, self.model, self.redis, state.gateway, self.randomness
        ) as world:
            reporter = DemandReporter(
                env=world.env, metrics=world.metrics, emit=state.lines.append, deployment="bench"
            )
            worker = Worker(world)
            state.workers.append(worker)
            with worker.scope:
                task_status.started()
                await world.worker(Child("demand_reporter", run=reporter.run)).run()
            state.workers.remove(worker)

    async def _start_later(self, nursery: trio.Nursery) -> None:
        self.state.starting += 1
        await trio.sleep(START_S)
        await nursery.start(self._work)
        self.state.starting -= 1

    async def _drain(self, worker: Worker) -> None:
        worker.is_draining = True
        await worker.world.drain()
        worker.scope.cancel()


async def measure(
    load: Load, rule: Callable[[FleetState], float], scale: int, seed: int
) -> Measured:
    plan = Plan(
        workers=MAX,
        slots=SLOTS // scale,
        shards=8,
        table_writes=40_000.0,
        think_s=THINK_S,
        scaling="bench",
    )
    randomness, clock = random.Random(seed), VirtualClock(EPOCH_S)
    fault_source = FaultSource(random=randomness, service_rates=plan.service_rates)
    model = AwsModel(clock=clock, fault_source=fault_source)
    redis = MeteredRedis(clock=clock, fault_source=fault_source)
    redis.primary.kept_s = 0.0  # bench/fleet.py says why.
    client = make_aws_client(model, randomness, Meter())
    await check_resources(client, names_of(plan.settings), region="us-east-1")
    state = FleetState(scale, SlowGateway(THINK_S, randomness, calls_max=1_000_000))
    return await Bench(load, rule, scale, randomness, plan, model, redis, state).run()


async def count_remaining(fleet: Fleet, jobs: list[Accepted]) -> int:
    remaining = 0
    for job in jobs:
        key = RunKey(job.job.job_id, job.run.run_id)
        run = await retry_while_unavailable(partial(fleet.unmetered.store.read, key))
        if run is not None and run.status in RUN_LIVE:
            totals = await retry_while_unavailable(partial(totals_of, fleet.unmetered, run))
            remaining += run.planned - totals.done
    return remaining


def _shortened(pages: int | None) -> list[Load]:
    """Returns the loads; those of one job get `pages` pages, if given."""
    return [
        replace(load, pages=pages, name=f"{pages:,} pages, cap {load.cap:,}")
        if pages and load.jobs == 1
        else load
        for load in LOADS
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench autoscaling", description=__doc__)
    parser.add_argument("--scale", type=int, help="divide the load and the slots by this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=int, action="append", help="run only this load (1 to 3)")
    parser.add_argument("--pages", type=int, help="pages of the loads with one job")
    parser.add_argument("--rule", action="append", choices=list(RULES), help="run only this rule")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    titles = (
        "load",
        "rule",
        "worker-hours",
        "drained after",
        "most workers",
        "10 workers after",
        "refetched",
        "CPU",
    )
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for number, load in enumerate(_shortened(options.pages), 1):
        if options.load and number not in options.load:
            continue
        for name in options.rule or RULES:
            scale = options.scale or load.scale
            result = trio.run(measure, load, RULES[name], scale, options.seed, clock=JumpClock())
            full = "never" if result.full_after_s is None else f"{result.full_after_s / 60:.0f} min"
            print(
                f"| {load.name} | {name} | {result.worker_hours:.1f} "
                f"| {result.drain_s / 3600:.2f} h "
                f"| {result.workers_most} | {full} | {result.refetched} | {result.cpu_s:.0f} s |",
                flush=True,
            )
