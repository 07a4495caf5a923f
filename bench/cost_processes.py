"""Compares the calls of six real worker processes with the calls that `bench cost` models.

The processes run in real time on servers that stand in for DynamoDB, SQS, S3 and Redis, with a
gateway that only waits. The model runs the same workers and the same list in virtual time. Both
arms count every call of the workers from the submit to the end of the list, and none of the process
that submits.

A worker also polls for work, so a list that takes longer needs more calls, and the local servers
make the processes slower than the model, which has AWS's latencies. Therefore both arms first count
the calls of the fleet while it has no work. The ratio compares the calls of the list without those;
the calls of an idle fleet are compared separately.
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
from bench.cost_steps import running_aws_servers
from bench.fleet import LONG, PLAN_SLOTS, Plan, SlowGateway, running_fleet
from bench.scale import FRESH_MAX, WARM, WARM_UP_S, count_done, retry_while_unavailable
from conveyor.bootstrap.runtime import create_resources, open_runtime
from conveyor.config import Settings, load_settings
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.engines.aws.client.usage import Meter
from conveyor.simulation.deterministic_trio import JumpClock
from conveyor.usecases.submit.jobs import Submission, submit
from tests.servers import ACCESS_KEY, SECRET_KEY

# Workers report and read the roster every 5 s (PRESENCE_S), so each has read the others twice.
ROSTER_S = 12.0
# Long enough for several rounds of a worker's periodic polls, most of which are 5 to 20 s apart.
IDLE_S = 60.0
POLL_S = 0.5
SERVICES = ("dynamodb", "sqs", "s3", "redis")
GATEWAY_URL = "https://gateway.example/"


class Load(msgspec.Struct, frozen=True):
    workers: int
    slots: int
    tasks: int
    think_s: float


class Counted(msgspec.Struct, frozen=True):
    """The calls of a list, how long it took, and the calls of the fleet in IDLE_S without work."""

    calls: Mapping[str, int]
    seconds: float
    idle: Mapping[str, int]

    def per_task(self, service: str, load: Load) -> float:
        return self.calls.get(service, 0) / load.tasks

    def beyond_idle(self, service: str, load: Load) -> float:
        """Returns the calls per task without those that an idle fleet makes in the same time."""
        idle = self.idle.get(service, 0) * self.seconds / IDLE_S
        return (self.calls.get(service, 0) - idle) / load.tasks

    def idle_per_s(self, service: str, load: Load) -> float:
        """Returns the calls of one idle worker in a second."""
        return self.idle.get(service, 0) / IDLE_S / load.workers


async def work(load: Load) -> None:
    """Runs one worker process. It prints its meter when it is ready, and again at each SIGUSR1."""
    settings = load_settings()
    # The limit that a gateway states is that of the key, which all workers share.
    calls_max = PLAN_SLOTS * load.workers * load.slots
    gateway = SlowGateway(load.think_s, random.Random(), calls_max=calls_max)
    async with open_runtime(settings, role="worker") as world, trio.open_nursery() as nursery:
        assert isinstance(world.meter, Meter)
        nursery.start_soon(replace(world, gateway=gateway).worker().run)
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            print(json.dumps(world.meter.calls), flush=True)
            async for _ in signals:
                print(json.dumps(world.meter.calls), flush=True)


def count_in_processes(settings: Settings, load: Load, folder: Path) -> Counted:
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
    command = [sys.executable, "-m", "bench", "cost_processes", "--worker"]
    command += ["--workers", str(load.workers), "--slots", str(load.slots)]
    command += ["--think", str(load.think_s)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(load.workers):
            with (folder / f"worker-{number}.log").open("wb") as log:
                process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log)
            processes.append(process)
        _read_all(processes)
        time.sleep(ROSTER_S)
        at_rest = _request_counts(processes)
        time.sleep(IDLE_S)
        before, began_at = _request_counts(processes), time.monotonic()
        trio.run(partial(_run_list, settings, load))
        seconds = time.monotonic() - began_at
        after = _request_counts(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Counted(_by_service(after - before), seconds, _by_service(before - at_rest))


def _request_counts(processes: list[subprocess.Popen[bytes]]) -> Counter[str]:
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    return _read_all(processes)


def _read_all(processes: list[subprocess.Popen[bytes]]) -> Counter[str]:
    calls: Counter[str] = Counter()
    for process in processes:
        assert process.stdout is not None
        calls.update(json.loads(process.stdout.readline()))
    return calls


def _by_service(calls: Counter[str]) -> Mapping[str, int]:
    by_service: Counter[str] = Counter()
    for name, count in calls.items():
        by_service[name.partition(".")[0]] += count
    return by_service


async def _run_list(settings: Settings, load: Load) -> None:
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
            await trio.sleep(POLL_S)
            run = await world.env.store.read(key)


def count_in_model(load: Load, seed: int) -> Counted:
    return trio.run(_count_in_model, load, seed, clock=JumpClock())


async def _count_in_model(load: Load, seed: int) -> Counted:
    plan = Plan(
        workers=load.workers,
        slots=load.slots,
        shards=SHARDS,
        table_writes=WARM,
        think_s=load.think_s,
    )
    async with running_fleet(plan, seed) as fleet:
        await trio.sleep(WARM_UP_S)
        at_rest = Counter(fleet.meter.calls)
        await trio.sleep(IDLE_S)
        before, began_at = Counter(fleet.meter.calls), trio.current_time()
        max_inflight = load.workers * load.slots
        key = await retry_while_unavailable(
            lambda: fleet.submit(LONG, load.tasks, max_inflight=max_inflight)
        )
        while await retry_while_unavailable(lambda: count_done(fleet, key)) < load.tasks:
            await trio.sleep(POLL_S)
        seconds = trio.current_time() - began_at
        calls = _by_service(fleet.meter.calls - before)
        return Counted(calls, seconds, _by_service(before - at_rest))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench cost_processes", description=__doc__)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--slots", type=int, default=40, help="pages that a worker has in flight")
    parser.add_argument("--tasks", type=int, default=2_000)
    parser.add_argument("--think", type=float, default=20.0, help="seconds that a page takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    load = Load(options.workers, options.slots, options.tasks, options.think)
    if options.worker:
        trio.run(work, load)
        return
    gc.set_threshold(FRESH_MAX, 20, 100)
    model = count_in_model(load, options.seed)
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name,
        running_aws_servers(folder := Path(name).resolve()) as settings,
    ):
        real = count_in_processes(settings, load, folder)
    show(model, real, load)
    if options.json:
        print(msgspec.json.encode(_json_line(model, real, load)).decode())


def show(model: Counted, real: Counted, load: Load) -> None:
    fleet = f"{load.workers} workers with {load.slots} slots"
    print(f"{fleet}, {load.tasks:,} pages of {load.think_s:g} s")
    print(f"the model took {model.seconds:.0f} s, the processes {real.seconds:.0f} s")
    for title, count in (
        ("calls per task, without those of an idle fleet", Counted.beyond_idle),
        ("calls of an idle worker in a second", Counted.idle_per_s),
        ("calls per task, with those that an idle fleet makes", Counted.per_task),
    ):
        print(f"{title:58}{'model':>9}{'processes':>11}{'ratio':>8}")
        rows = [(name, count(model, name, load), count(real, name, load)) for name in SERVICES]
        rows.append(("total", sum(row[1] for row in rows), sum(row[2] for row in rows)))
        for name, modelled, counted in rows:
            ratio = f"{counted / modelled:.2f}x" if modelled else ""
            print(f"  {name:56}{modelled:>9.3f}{counted:>11.3f}{ratio:>8}")


def _json_line(model: Counted, real: Counted, load: Load) -> dict[str, float]:
    modelled = sum(model.beyond_idle(name, load) for name in SERVICES)
    counted = sum(real.beyond_idle(name, load) for name in SERVICES)
    idle_model = sum(model.idle_per_s(name, load) for name in SERVICES)
    idle_real = sum(real.idle_per_s(name, load) for name in SERVICES)
    return {
        "model_calls": round(modelled, 3),
        "process_calls": round(counted, 3),
        "ratio": round(counted / modelled, 3),
        "idle_ratio": round(idle_real / idle_model, 3),
    }
