"""Measures what a page costs through the API of `conveyor dev`, compared with a loop that writes
files.

The bench starts the real service as a process, POSTs a list, and measures from the POST to the
recorded end of the run. CPU time is that of all processes of the service in this time and until
they are idle again. The bare loop is aiohttp on uvloop with plain writes, without its imports,
because the service too has started before the measurement. The origin is nginx where it is
installed. A ratio is taken within a round, and the median of the rounds is shown.

A second process can gain at most the CPU time that the other programs leave: the table therefore
shows the number of cores that each arm kept busy, the origin included.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.scrape import BARE, PAGE_BYTES, Origin, running_cheap_origin

NAMES = {
    "bare": "aiohttp + uvloop, plain files",
    "conveyor": "conveyor dev",
    "conveyor-2": "conveyor dev --processes 2",
}
POLL_S = 0.1
# The service is idle in a poll if it used less CPU than this since the previous one.
IDLE_CPU_S = 0.02
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Measured(msgspec.Struct, frozen=True):
    pages: int
    seconds: float
    cpu_s: float
    origin_cpu_s: float

    @property
    def cores(self) -> float:
        return (self.cpu_s + self.origin_cpu_s) / self.seconds


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench service", description=__doc__)
    parser.add_argument("--n", type=int, default=5_000, help="pages")
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", choices=NAMES, default=[*NAMES])
    parser.add_argument("--dir", type=Path, default=Path(), help="where the folders are made")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with running_cheap_origin() as origin:
        print(f"origin: {origin.name}, {PAGE_BYTES:,} bytes, {options.concurrency} in flight")
        rounds = [run_round(origin, options) for _ in range(options.rounds)]
    show(rounds)
    line = {
        "n": options.n,
        "cpu_ratio": ratio(rounds, "conveyor", "bare", lambda arm: arm.cpu_s),
        "cpu_ratio_2": ratio(rounds, "conveyor-2", "bare", lambda arm: arm.cpu_s),
        "rate_ratio_2": ratio(rounds, "conveyor", "conveyor-2", lambda arm: arm.seconds),
    }
    if options.json:
        print(msgspec.json.encode(line).decode())


def run_round(origin: Origin, options: argparse.Namespace) -> dict[str, Measured]:
    done = {}
    for arm in options.arms:
        folder = Path(tempfile.mkdtemp(dir=options.dir, prefix=".bench-")).resolve()
        before = cpu_s_of(origin.pid)
        try:
            run = run_bare if arm == "bare" else run_service
            processes = 2 if arm == "conveyor-2" else 1
            seconds, cpu_s = run(origin.url, options.n, options.concurrency, folder, processes)
        finally:
            shutil.rmtree(folder)
        done[arm] = Measured(options.n, seconds, cpu_s, cpu_s_of(origin.pid) - before)
    return done


def run_bare(url: str, count: int, concurrency: int, folder: Path, _: int) -> tuple[float, float]:
    urls = folder / "urls.txt"
    urls.write_text("\n".join(urls_of(url, count)))
    command = [sys.executable, "-c", BARE, str(urls), str(concurrency), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=tuple[float, float])


def run_service(
    url: str, count: int, concurrency: int, folder: Path, processes: int
) -> tuple[float, float]:
    """Returns the seconds from the POST to the end of the run, and the CPU seconds."""
    with running_service(folder, concurrency, processes) as (pid, port):
        wait_until_idle(pid)
        body = msgspec.json.encode(
            {"tasks": [{"url": page_url} for page_url in urls_of(url, count)]}
        )
        before, posted_at = cpu_s_of(pid), time.time()
        job = call(port, "POST", "/v1/jobs", body)
        path = f"/v1/jobs/{job['job_id']}"
        while not (run := call(port, "GET", path)["latest_run"])["terminal"]:
            time.sleep(POLL_S)
        wait_until_idle(pid)
        cpu_s = cpu_s_of(pid) - before
    ended_at = datetime.fromisoformat(run["updated_at"]).timestamp()
    return ended_at - posted_at, cpu_s


@contextmanager
def running_service(folder: Path, concurrency: int, processes: int) -> Iterator[tuple[int, int]]:
    """Runs `conveyor dev`. Yields its process id and its port."""
    environ = {
        **os.environ,
        "CONVEYOR_DATA_DIR": str(folder / "data"),
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1",
        "CONVEYOR_CONCURRENCY": str(concurrency),
        "CONVEYOR_MAX_INFLIGHT": str(concurrency),
    }
    command = [str(Path(sys.executable).with_name("conveyor")), "dev", "--port", "0"]
    command += ["--processes", str(processes)]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "listening on" in line)
            yield process.pid, int(line.rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def call(port: int, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"X-API-Key": "bench", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status < 300, content
        return msgspec.json.decode(content, type=dict[str, Any])
    finally:
        connection.close()


def urls_of(url: str, count: int) -> Iterator[str]:
    return (f"{url}/p/{number}" for number in range(count))


def wait_until_idle(pid: int) -> None:
    """Waits until the processes use almost no CPU in three polls: all have started, or all have
    finished."""
    idle, before = 0, cpu_s_of(pid)
    while idle < 3:
        time.sleep(POLL_S)
        now = cpu_s_of(pid)
        idle = idle + 1 if now - before < IDLE_CPU_S else 0
        before = now


def cpu_s_of(pid: int | None) -> float:
    """Returns the CPU seconds of a process and of its living descendants."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) * TICK_S
    # Each thread lists the children that it started.
    lists = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    children = [int(child) for path in lists for child in path.read_text().split()]
    return own + sum(map(cpu_s_of, children))


def ratio(
    rounds: Sequence[Mapping[str, Measured]],
    above: str,
    below: str,
    value: Callable[[Measured], float],
) -> float:
    """Returns the median of the ratios of all rounds."""
    return round(
        median(
            value(round_results[above]) / value(round_results[below]) for round_results in rounds
        ),
        3,
    )


def show(rounds: Sequence[Mapping[str, Measured]]) -> None:
    print(f"{'':32}{'wall s':>8}{'CPU s':>8}{'CPU ms/page':>13}{'pages/s':>9}{'cores':>7}")
    for arm in rounds[0]:
        runs = [round_results[arm] for round_results in rounds]
        wall, cpu = median(run.seconds for run in runs), median(run.cpu_s for run in runs)
        count = runs[0].pages
        print(
            f"{NAMES[arm]:32}{wall:>8.2f}{cpu:>8.2f}{cpu / count * 1000:>13.3f}"
            f"{count / wall:>9,.0f}{median(run.cores for run in runs):>7.2f}"
        )
