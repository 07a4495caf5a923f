"""Runs the arms of `bench amplification` on real servers: LocalStack's SQS, Redis, and processes.

The dispatchers of one process keep their rows in the memory engine. Worker processes keep them in
ministack's DynamoDB and S3, as they would in AWS.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import which

import msgspec
import trio

from bench.amplification import KILLED, ONE_PROCESS, PROCESSES, OnProgress, Results, run_all
from bench.dispatch import Arm, Drained, Link, Shared, Tally, drain, summarize_drain
from conveyor.bootstrap.runtime import create_resources, open_runtime
from conveyor.config import Settings, settings_from
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.engines.memory import memory_engine
from conveyor.engines.redis import open_redis
from conveyor.engines.system import SystemClock
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import run_progress
from conveyor.usecases.submit.jobs import Submission, submit
from tests.aws import REGION, an_access, an_http_transport
from tests.servers import (
    ACCESS_KEY,
    LOCALSTACK,
    SECRET_KEY,
    SERVERS,
    a_localstack,
    a_ministack,
    a_redis,
)

SHORT_TASKS, KILLED_TASKS = 333, 150
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Servers:
    sqs: str
    redis: str
    rest: str
    folder: Path


def run_on_servers(*, short: bool = False) -> Results:
    """Runs the arms in real time. The arm with a kill has fewer tasks than in the model."""
    missing = [
        program
        for program in (LOCALSTACK, SERVERS / "ministack", "redis-server")
        if not which(program)
    ]
    if missing:
        print(
            f"\nNo arms on local servers: {missing[0]} is not installed (`make test` installs it)."
        )
        return {}
    with tempfile.TemporaryDirectory(prefix="amplification-") as folder:
        where = Path(folder)
        with (
            a_localstack(where / "sqs") as sqs,
            a_redis(where / "redis") as redis,
            a_ministack(where / "rest") as rest,
        ):
            servers = Servers(sqs, redis, rest, where)
            return _run_on(servers, short=short)


def _run_on(servers: Servers, *, short: bool) -> Results:
    print("\nSQS server, dispatchers in one process:")
    results = run_all(
        ONE_PROCESS,
        lambda arm, on_progress: trio.run(
            in_one_process, servers.sqs, servers.redis, arm, on_progress
        ),
    )
    print("\nSQS server, worker processes (one of four is killed, and its claims expire):")
    smaller, permits = msgspec.structs.replace, PROCESSES["permits_processes"]
    arms = {
        "permits_processes": smaller(permits, tasks=SHORT_TASKS) if short else permits,
        "permits_killed": smaller(KILLED["permits_killed"], tasks=KILLED_TASKS),
    }
    return results | run_all(arms, partial(_in_processes, servers))


async def in_one_process(sqs: str, redis_url: str, arm: Arm, on_progress: OnProgress) -> Drained:
    """Runs an arm on real servers in real time; its rows are in the memory engine."""
    clock, randomness = SystemClock(), random.Random()
    space = f"bench-{randomness.getrandbits(32):08x}"
    async with (
        an_http_transport(an_access(sqs=sqs)) as transport,
        open_redis(
            redis_url,
            random=randomness,
            space=space,
            owner=space,
            workers_on=run_progress.WORKERS,
        ) as redis,
    ):
        memory = memory_engine(clock=clock, random=randomness)
        shared = Shared(
            transport=transport,
            coordinator=redis.coordinator,
            memory=memory,
            clock=clock,
            random=randomness,
        )
        return await drain(shared, arm, lambda: Link(randomness), on_progress)


def _in_processes(servers: Servers, arm: Arm, on_progress: OnProgress) -> Drained:
    name = f"bench-{random.getrandbits(32):08x}"
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": servers.rest,
        "AWS_ENDPOINT_URL_SQS": servers.sqs,
        "CONVEYOR_ENGINE": "aws",
        "CONVEYOR_TABLE": name,
        "CONVEYOR_BUCKET": name,
        "CONVEYOR_QUEUE_PREFIX": f"{name}-",
        "CONVEYOR_REDIS_URL": servers.redis,
        "CONVEYOR_SECRET_KEY": name,
        "CONVEYOR_CONCURRENCY": str(arm.dispatchers),
    }
    workers = Workers(servers.folder / name, arm.think_s)
    with _environ(environ), workers.killing_at_the_end():
        return trio.run(_run_list, settings_from(environ), arm, workers, on_progress)


@contextmanager
def _environ(environ: dict[str, str]) -> Generator[None, None, None]:
    """Sets environment variables from which this process and the workers read endpoints."""
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(slots=True)
class Workers:
    """Worker processes, and the messages that each of them reports as received."""

    folder: Path
    think_s: float
    tallies: list[Tally] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def killing_at_the_end(self) -> Generator[None, None, None]:
        self.folder.mkdir()
        try:
            yield
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def start(self, count: int) -> None:
        for number in range(count):
            with (self.folder / f"{number}.log").open("wb") as log:
                command = [sys.executable, "-m", "bench.multi_process_worker", str(self.think_s)]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
            tally = Tally()
            reader = threading.Thread(target=_read_counts, args=(process, tally), daemon=True)
            reader.start()
            self.processes.append(process)
            self.tallies.append(tally)
            self.readers.append(reader)

    def kill_busiest(self) -> None:
        counts = [tally.messages for tally in self.tallies]
        self.processes[counts.index(max(counts))].kill()

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(STOP_S)
        for reader in self.readers:
            reader.join()

    def total_tally(self) -> Tally:
        return Tally(
            sum(tally.messages for tally in self.tallies),
            sum(tally.calls for tally in self.tallies),
            sum(tally.empty_calls for tally in self.tallies),
        )


def _read_counts(process: subprocess.Popen[bytes], tally: Tally) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        tally.count(int(line))


async def _run_list(
    settings: Settings, arm: Arm, workers: Workers, on_progress: OnProgress
) -> Drained:
    await create_resources(settings)
    async with open_runtime(settings, role="api") as world:
        drafts = [TaskDraft(url=f"https://example.com/{number}") for number in range(arm.tasks)]
        accepted = await submit(
            world.env,
            CallerId("bench"),
            Submission(drafts=drafts, max_inflight=arm.cap),
            job_id=JobId(world.env.new_id()),
        )
        key = RunKey(accepted.job.job_id, accepted.run.run_id)
        workers.start(arm.processes)
        started_at, is_to_kill = time.perf_counter(), arm.killed_at > 0
        while (run := await world.env.store.read(key)) is None or run.ended_at is None:
            done = 0 if run is None else (await totals_of(world.env, run)).successful
            on_progress(done)
            if is_to_kill and done >= arm.killed_at:
                workers.kill_busiest()
                is_to_kill = False
            await trio.sleep(0.2)
        seconds = time.perf_counter() - started_at
        on_progress(arm.tasks)
        totals = await totals_of(world.env, run)
    workers.stop()
    return summarize_drain(arm, totals, workers.total_tally(), seconds)
