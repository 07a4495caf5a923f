"""Measures the time and memory of an export, compared with the standard library's zipfile.

One data directory contains finished tasks whose bodies are stored in packs. The arms run in turn,
each alone in its own process: our zip, JSON lines and Parquet, durable and published, and zipfile
over the same bodies, read directly from the disk.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from random import Random

import msgspec
import trio

from bench.throughput_variants import Measured
from conveyor.config import Settings
from conveyor.domain.changes import Change, Insert, JobKey, RunKey, TaskKey
from conveyor.domain.export_record import ExportFormat, ExportOrder
from conveyor.domain.ids import FIRST_BATCH, CallerId, JobId, RunId, task_id
from conveyor.domain.model import Job, JobStatus, Result, Run, RunStatus, Task, TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.export import Exported, ExportOptions

ARMS = {
    "bare": "zipfile, read from disk",
    "zip": "Conveyor, zip",
    "jsonl": "Conveyor, jsonl",
    "parquet": "Conveyor, parquet",
    "parquet/list": "Conveyor, parquet, list order",
}
CALLER = CallerId("bench")
JOB, RUN = JobId("0" * 25 + "1"), RunId("0" * 25 + "2")
GROUP = 500
WORDS = [f"<p class='item-{number}'>word {number * 7919 % 1000}</p>\n" for number in range(1000)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench export", description=__doc__)
    parser.add_argument("--n", type=int, default=5_000, help="results")
    parser.add_argument("--size", type=int, default=10_000, help="bytes of a body")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-"))
    try:
        trio.run(fill, folder, options.n, options.size)
        measured = {arm: run_arm(arm, folder) for arm in ARMS}
    finally:
        shutil.rmtree(folder)
    print(f"{options.n:,} results of {options.size:,} bytes")
    print(f"{'':31}{'seconds':>9}{'CPU s':>9}{'ratio':>8}{'RSS MB':>8}")
    for arm, result in measured.items():
        ratio = result.seconds / measured["bare"].seconds
        print(
            f"{ARMS[arm]:31}{result.seconds:>9.1f}{result.cpu_s:>9.1f}{ratio:>7.2f}x{result.rss_mb:>8.0f}"
        )


def run_arm(arm: str, folder: Path) -> Measured:
    command = [sys.executable, "-m", "bench.export", arm, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


async def fill(folder: Path, count: int, size_bytes: int) -> None:
    """Creates a completed run of `count` successful tasks."""
    from conveyor.bootstrap.runtime import open_runtime

    random = Random(1)
    async with open_runtime(Settings(data_dir=folder / "data"), role="bench") as world:
        env, now = world.env, world.env.now()
        job = Job(JOB, CALLER, JobStatus.CLOSED, now, now, latest_run_id=RUN)
        run = Run(JOB, RUN, CALLER, 1, RunStatus.COMPLETED, now, now, planned=count, total=count)
        await env.commit(Change((Insert(JobKey(JOB), job), Insert(RunKey(JOB, RUN), run))))
        for start in range(0, count, GROUP):
            tasks: list[Task] = []
            async with trio.open_nursery() as nursery:
                for index in range(start, min(start + GROUP, count)):
                    body = "".join(random.choices(WORDS, k=size_bytes // 32)).encode()
                    nursery.start_soon(_add, env, index, body, tasks)
            inserts = [Insert(TaskKey(JOB, RUN, task.task_id, 0), task) for task in tasks]
            await env.store.commit([Change((insert,)) for insert in inserts])


async def _add(env: Context, index: int, body: bytes, tasks: list[Task]) -> None:
    stored = await env.blobs.add(f"jobs/{JOB}/runs/{RUN}", str(index), [body])
    task = Task(
        run_id=RUN,
        task_id=task_id(RUN, FIRST_BATCH, index),
        shard=0,
        batch_id=FIRST_BATCH,
        index=index,
        url=f"https://example.com/{index}",
        status=TaskStatus.SUCCESSFUL,
        created_at=env.now(),
        updated_at=env.now(),
        result=Result(stored.key, stored.size_bytes, stored.sha256, "text/html", 200),
    )
    tasks.append(task)


async def ours(arm: str, folder: Path) -> int:
    from conveyor.bootstrap.runtime import open_runtime

    async with open_runtime(Settings(data_dir=folder / "data"), role="bench") as world:
        env = world.env
        name, _, order = arm.partition("/")
        kind, order = ExportFormat(name), ExportOrder(order or "id")
        export = await exports.start(
            env, CALLER, JOB, RUN, kind, ExportOptions(order), export_id=env.new_id()
        )
        assert await exports.process(env, export) is Exported.COMPLETED
        finished = await exports.own_export(env, CALLER, JOB, RUN, export.export_id)
        assert finished.manifest is not None
        return finished.manifest.entries


async def bare(folder: Path) -> int:
    """Writes all bodies into a zip file without any durability: no sync, no checkpoint."""
    from conveyor.bootstrap.runtime import open_runtime

    done, after = 0, None
    async with open_runtime(Settings(data_dir=folder / "data"), role="bench") as world:
        with zipfile.ZipFile(
            folder / "bare.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=zlib.Z_BEST_SPEED
        ) as archive:
            while True:
                query = TasksOf(job_id=JOB, run_id=RUN, shard_count=1, after=after, limit=GROUP)
                page = await world.env.store.find(query)
                for task in page:
                    assert task.result is not None
                    archive.writestr(f"{task.task_id}.html", _read(folder, task.result))
                done += len(page)
                if len(page) < GROUP:
                    return done
                after = page[-1].task_id


def _read(folder: Path, result: Result) -> bytes:
    above, _, last = result.key.rpartition("/")
    _, name, offset, size_bytes = last.split(".")
    with (folder / "data" / "blobs" / above / f"pack.,{name}").open("rb") as pack:
        pack.seek(int(offset))
        return pack.read(int(size_bytes))


def _main() -> None:
    arm, folder = sys.argv[1], Path(sys.argv[2])
    begun_at = time.perf_counter()
    pages = trio.run(bare, folder) if arm == "bare" else trio.run(ours, arm, folder)
    seconds = time.perf_counter() - begun_at
    used = resource.getrusage(resource.RUSAGE_SELF)
    measured = Measured(pages, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    _main()
