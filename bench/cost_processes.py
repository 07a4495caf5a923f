"""Do six real worker processes make as many calls as the model of `bench cost` says?

The processes work on servers that stand in for DynamoDB, SQS, S3 and Redis, in real time, with a
gateway that only thinks. The model runs the same workers and the same list in virtual time. Both
count every call of the workers from the submit to the end of the list; the calls of a callers'
process are left out. On a busy machine the processes are slower than the model, and poll more.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import trio

from bench.cost import SHARDS
from bench.cost import measure as measure_model
from bench.cost_steps import a_cloud
from bench.fleet import LONG, PLAN_SLOTS, Plan, SlowGateway
from bench.scale import FRESH_MAX, WARM
from conveyor.bootstrap.runtime import create_resources, open_runtime
from conveyor.config import Settings, load_settings
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.engines.aws.client.usage import Meter
from conveyor.simulation.deterministic_trio import JumpClock
from conveyor.usecases.submit.jobs import Submission, submit
from tests.servers import ACCESS_KEY, SECRET_KEY

# All workers have read the reports of one another, twice.
ACQUAINTED_S = 12.0
LOOK_S = 0.5
SERVICES = ("dynamodb", "sqs", "s3", "redis")
GATEWAY_URL = "https://gateway.example/"


class Load(msgspec.Struct, frozen=True):
    workers: int
    slots: int
    tasks: int
    think_s: float


async def work(think_s: float) -> None:
    """One worker process: prints its meter when it can be asked, and then at each SIGUSR1."""
    settings = load_settings()
    calls_max = PLAN_SLOTS * settings.concurrency
    gateway = SlowGateway(think_s, random.Random(), calls_max=calls_max)
    async with open_runtime(settings, role="worker") as world, trio.open_nursery() as nursery:
        assert isinstance(world.meter, Meter)
        nursery.start_soon(replace(world, gateway=gateway).worker().run)
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            print(json.dumps(world.meter.calls), flush=True)
            async for _ in signals:
                print(json.dumps(world.meter.calls), flush=True)


def count_in_processes(settings: Settings, load: Load, folder: Path) -> Mapping[str, float]:
    trio.run(create_resources, settings)
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "CONVEYOR_ENGINE": settings.engine,
        "CONVEYOR_TABLE": settings.table,
        "CONVEYOR_BUCKET": settings.bucket,
        "CONVEYOR_QUEUE_PREFIX": settings.queue_prefix,
        "CONVEYOR_REDIS_URL": settings.redis_url or "",
        "CONVEYOR_SECRET_KEY": settings.secret_key or "",
        "CONVEYOR_GATEWAY_URL": GATEWAY_URL,
        "CONVEYOR_SYNC_TASKS_MAX": str(settings.sync_tasks_max),
        "CONVEYOR_CONCURRENCY": str(load.slots),
    }
    command = [sys.executable, "-m", "bench", "cost_processes", "--worker", str(load.think_s)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(load.workers):
            with (folder / f"worker-{number}.log").open("wb") as log:
                process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log)
            processes.append(process)
        _read_all(processes)
        time.sleep(ACQUAINTED_S)
        before = _ask_all(processes)
        trio.run(partial(_see_through, settings, load))
        grown = _ask_all(processes) - before
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _by_service(grown, load.tasks)


def _ask_all(processes: list[subprocess.Popen[bytes]]) -> Counter[str]:
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    return _read_all(processes)


def _read_all(processes: list[subprocess.Popen[bytes]]) -> Counter[str]:
    calls: Counter[str] = Counter()
    for process in processes:
        assert process.stdout is not None
        calls.update(json.loads(process.stdout.readline()))
    return calls


def _by_service(calls: Counter[str], tasks: int) -> Mapping[str, float]:
    by_service: Counter[str] = Counter()
    for name, count in calls.items():
        by_service[name.partition(".")[0]] += count
    return {name: by_service[name] / tasks for name in SERVICES}


async def _see_through(settings: Settings, load: Load) -> None:
    """Submits the list and waits for its end."""
    settings = replace(settings, gateway_url=GATEWAY_URL)
    async with open_runtime(settings, role="api") as world:
        drafts = [TaskDraft(url=f"https://{LONG}.example/{n}") for n in range(load.tasks)]
        submission = Submission(drafts=drafts, max_inflight=load.workers * load.slots)
        job_id = JobId(world.env.new_id())
        accepted = await submit(world.env, CallerId(LONG), submission, job_id=job_id)
        key = RunKey(accepted.job.job_id, accepted.run.run_id)
        run = await world.env.store.read(key)
        while run is None or run.ended_at is None:
            await trio.sleep(LOOK_S)
            run = await world.env.store.read(key)


def count_in_model(load: Load, seed: int) -> Mapping[str, float]:
    plan = Plan(
        workers=load.workers,
        slots=load.slots,
        shards=SHARDS,
        table_writes=WARM,
        think_s=load.think_s,
    )
    used = trio.run(measure_model, plan, load.tasks, 0, seed, clock=JumpClock())
    return {name: used.calls.get(name, 0.0) for name in SERVICES}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench cost_processes", description=__doc__)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--slots", type=int, default=10, help="pages that a worker has in flight")
    parser.add_argument("--tasks", type=int, default=1_500)
    parser.add_argument("--think", type=float, default=2.0, help="seconds that a page takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    if options.worker is not None:
        trio.run(work, options.worker)
        return
    gc.set_threshold(FRESH_MAX, 20, 100)
    load = Load(options.workers, options.slots, options.tasks, options.think)
    model = count_in_model(load, options.seed)
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name,
        a_cloud(folder := Path(name).resolve()) as settings,
    ):
        real = count_in_processes(settings, load, folder)
    show(model, real, load)
    if options.json:
        print(msgspec.json.encode(_line(model, real)).decode())


def show(model: Mapping[str, float], real: Mapping[str, float], load: Load) -> None:
    fleet = f"{load.workers} workers with {load.slots} slots"
    print(f"{fleet}, {load.tasks:,} pages of {load.think_s:g} s")
    print(f"{'calls per task':16}{'model':>9}{'processes':>11}{'ratio':>8}")
    rows = [(name, model[name], real[name]) for name in SERVICES]
    rows.append(("together", sum(model.values()), sum(real.values())))
    for name, modelled, made in rows:
        print(f"  {name:14}{modelled:>9.3f}{made:>11.3f}{made / modelled:>7.2f}x")


def _line(model: Mapping[str, float], real: Mapping[str, float]) -> dict[str, float]:
    modelled, made = sum(model.values()), sum(real.values())
    return {
        "model_calls": round(modelled, 3),
        "process_calls": round(made, 3),
        "ratio": round(made / modelled, 3),
    }
