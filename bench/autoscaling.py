"""Which metric should workers be scaled by?

Real workers run in virtual time on modelled AWS and Redis. A controller decides once a minute as
target tracking does: it scales out after 3 values above the target, in after 15 values below nine
tenths of it, and a new worker needs a minute to start. A removed worker drains as on SIGTERM. The
rules see what they would see on AWS. The load is scaled down with the slots of a worker, so that
times and worker-hours are those of the whole: `--scale 20` runs 50,000 pages instead of a million,
on workers with 10 slots instead of 200. Without it each load has a scale of its own; all of them
take about 15 minutes.
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
from bench.fleet import EPOCH_S, Fleet, MeteredRedis, Plan, SlowGateway, a_worker, an_aws_client
from bench.scale import insist
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
# CPU of one page in a worker on AWS, over one vCPU.
PAGE_CPU_S = 0.0012
# A backlog that one worker drains in five minutes.
BACKLOG_TARGET = SLOTS / THINK_S * 300
OUT_VALUES, IN_VALUES = 3, 15
OUT_COOLDOWN_S, IN_COOLDOWN_S = 180.0, 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs of equal length, all submitted at the start."""

    name: str
    jobs: int
    pages: int
    cap: int
    scale: int


LOADS = (
    Load("a million pages, cap 10,000", 1, 1_000_000, 10_000, 200),
    # Half a worker has to remain a whole slot.
    Load("a million pages, default cap 100", 1, 1_000_000, 100, 100),
    Load("2,000 jobs of 100 pages", 2_000, 100, 100, 50),
)


@dataclass(slots=True)
class Worker:
    world: Runtime
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_draining: bool = False


@dataclass(slots=True)
class Scene:
    """The fleet and what a rule may look at."""

    scale: int
    gateway: SlowGateway
    left: int = 0
    workers: list[Worker] = field(default_factory=list)
    lines: deque[str] = field(default_factory=deque)
    served_at_last: int = 0
    starting: int = 0

    @property
    def active(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.is_draining]


def by_demand(scene: Scene) -> float:
    values = [json.loads(line)["DemandPercent"] for line in scene.lines]
    scene.lines.clear()
    return sum(values) / len(values) / 80 if values else 0.0


def by_backlog(scene: Scene) -> float:
    return scene.left * scene.scale / len(scene.active) / BACKLOG_TARGET


def by_cpu(scene: Scene) -> float:
    served = (scene.gateway.served - scene.served_at_last) * scene.scale
    scene.served_at_last = scene.gateway.served
    return served * PAGE_CPU_S / PERIOD_S / len(scene.active) / 0.6


def by_slots(scene: Scene) -> float:
    limiters = [worker.world.limiter for worker in scene.active]
    return (
        sum(limiter.inflight_count / limiter.slots_count for limiter in limiters)
        / len(limiters)
        / 0.8
    )


RULES: dict[str, Callable[[Scene], float]] = {
    "demand": by_demand,
    "backlog": by_backlog,
    "CPU": by_cpu,
    "slots in use": by_slots,
}


@dataclass(slots=True)
class TargetTracking:
    """The ratios of metric and target of the last minutes, newest last."""

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
    most: int
    full_after_s: float | None
    refetched: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True)
class Bench:
    """One fleet under one rule, from its start until it has scaled in again."""

    load: Load
    rule: Callable[[Scene], float]
    scale: int
    draw: random.Random
    plan: Plan
    model: AwsModel
    redis: MeteredRedis
    scene: Scene
    meter: Meter = field(default_factory=Meter)

    @property
    def jobs(self) -> int:
        return max(1, self.load.jobs // self.scale)

    # One long job is divided by its pages, many jobs by their number.
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
                await insist(
                    partial(fleet.submit, f"caller-{n % 40}", self.pages, max_inflight=self.cap)
                )
                for n in range(self.jobs)
            ]
            result = await self._control(nursery, fleet, jobs)
            nursery.cancel_scope.cancel()
        return replace(
            result,
            refetched=self.scene.gateway.served - self.jobs * self.pages,
            cpu_s=time.process_time() - began,
        )

    async def _fleet(self) -> Fleet:
        first, names = self.scene.workers[0].world, names_of(self.plan.settings)
        client = an_aws_client(self.model, self.draw, Meter())
        watch = await build_engine(
            client, self.model, names, clock=first.env.clock, random=self.draw
        )
        return Fleet(
            plan=self.plan,
            model=self.model,
            meter=self.meter,
            gateway=self.scene.gateway,
            env=first.env,
            watch=replace(first.env, store=watch.store),
        )

    async def _control(self, nursery: trio.Nursery, fleet: Fleet, jobs: list[Accepted]) -> Measured:
        scene, tracking = self.scene, TargetTracking()
        started_at, hours, most = trio.current_time(), 0.0, MIN
        full_after_s = drain_s = None
        scene.lines.clear()  # Of the idle fleet.
        while drain_s is None or len(scene.active) > MIN or scene.starting:
            await trio.sleep(PERIOD_S)
            hours += len(scene.workers) * PERIOD_S / 3600
            scene.left = await count_left(fleet, jobs)
            elapsed_s = trio.current_time() - started_at
            if not scene.left and drain_s is None:
                drain_s = elapsed_s
            most = max(most, len(scene.active))
            if len(scene.active) == MAX and full_after_s is None:
                full_after_s = elapsed_s
            workers_count = tracking.decide(len(scene.active), self.rule(scene), elapsed_s)
            for _ in range(workers_count - len(scene.active) - scene.starting):
                nursery.start_soon(self._start_later, nursery)
            # The first worker serves the callers of this bench, and is never removed.
            for worker in scene.active[workers_count:]:
                nursery.start_soon(self._drain, worker)
        return Measured(hours, drain_s, most, full_after_s)

    async def _work(self, *, task_status: trio.TaskStatus[None]) -> None:
        scene, client = self.scene, an_aws_client(self.model, self.draw, self.meter)
        async with a_worker(
            self.plan, client, self.model, self.redis, scene.gateway, self.draw
        ) as world:
            reporter = DemandReporter(
                env=world.env, metrics=world.metrics, emit=scene.lines.append, deployment="bench"
            )
            worker = Worker(world)
            scene.workers.append(worker)
            with worker.scope:
                task_status.started()
                await world.worker(Child("demand_reporter", run=reporter.run)).run()
            scene.workers.remove(worker)

    async def _start_later(self, nursery: trio.Nursery) -> None:
        self.scene.starting += 1
        await trio.sleep(START_S)
        await nursery.start(self._work)
        self.scene.starting -= 1

    async def _drain(self, worker: Worker) -> None:
        worker.is_draining = True
        await worker.world.drain()
        worker.scope.cancel()


async def measure(load: Load, rule: Callable[[Scene], float], scale: int, seed: int) -> Measured:
    plan = Plan(
        workers=MAX,
        slots=SLOTS // scale,
        shards=8,
        table_writes=40_000.0,
        think_s=THINK_S,
        scaling="bench",
    )
    draw, clock = random.Random(seed), VirtualClock(EPOCH_S)
    fate = FaultSource(random=draw, pessimism=plan.pessimism)
    model = AwsModel(clock=clock, fault_source=fate)
    redis = MeteredRedis(clock=clock, fault_source=fate)
    redis.primary.kept_s = 0.0  # As in bench/fleet.py.
    client = an_aws_client(model, draw, Meter())
    await check_resources(client, names_of(plan.settings), region="us-east-1")
    scene = Scene(scale, SlowGateway(THINK_S, draw, calls_max=1_000_000))
    return await Bench(load, rule, scale, draw, plan, model, redis, scene).run()


async def count_left(fleet: Fleet, jobs: list[Accepted]) -> int:
    left = 0
    for job in jobs:
        key = RunKey(job.job.job_id, job.run.run_id)
        run = await insist(partial(fleet.watch.store.read, key))
        if run is not None and run.status in RUN_LIVE:
            totals = await insist(partial(totals_of, fleet.watch, run))
            left += run.planned - totals.done
    return left


def _shortened(pages: int | None) -> list[Load]:
    """Returns the loads, those of one job with so many pages."""
    return [
        replace(load, pages=pages, name=f"{pages:,} pages, cap {load.cap:,}")
        if pages and load.jobs == 1
        else load
        for load in LOADS
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench autoscaling", description=__doc__)
    parser.add_argument("--scale", type=int, help="divides the load and the slots")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=int, action="append", help="only this one (1 to 3)")
    parser.add_argument("--pages", type=int, help="another length for the loads of one job")
    parser.add_argument("--rule", action="append", choices=list(RULES), help="only this one")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    titles = "load", "rule", "worker-hours", "drained after", "most", "10 after", "refetched", "CPU"
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
                f"| {result.most} | {full} | {result.refetched} | {result.cpu_s:.0f} s |",
                flush=True,
            )
