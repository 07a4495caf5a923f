"""Runs a job of a million lines from submit to deletion, and measures time and memory.

The bench starts one `conveyor dev` on a new data directory. One client submits, watches the ingest,
pages through every row, asks for one status, stops and deletes the job, and waits until no row of
it is left. With `--engine postgres` the job runs on a PostgreSQL server with durable commits, and
before that on SQLite for comparison.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import trio

from bench.ingest_variants import send
from bench.postgres_variants import environ_for
from tests.postgres import execute
from tests.servers import DURABLE, a_postgres

PAGE = 1_000
SAMPLES = 11
IDLE_REPORTED_S = 11.0  # An idle PostgreSQL backend reports its read counters after 10 s.
CONCURRENCY = 200
GIVE_UP_S = 1_200.0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench million", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    names = ["embedded"] if options.engine == "embedded" else ["embedded", options.engine]
    figures = {name: measure(ENGINES[name], options.tasks) for name in names}
    show(figures)
    if options.json:
        line = {name: round(value, 3) for name, value in figures[options.engine].items()}
        print(msgspec.json.encode(line).decode())


def measure(engine: OpenEngine, count: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-"))
    try:
        with engine(folder) as data, running_server(folder, data.environ) as (url, pid):
            figures = measure_job(url, count, data)
            return figures | {"rss_mb": peak_rss_mb(pid)}
    finally:
        shutil.rmtree(folder)


def show(figures: Mapping[str, Mapping[str, float]]) -> None:
    base, *others = figures
    print(f"{'':22}" + "".join(f"{name:>12}" for name in figures))
    for name, value in figures[base].items():
        values = [figures[other][name] for other in others]
        ratios = "".join(f"{other / value:>11.2f}x" for other in values if value > 0)
        print(f"{name:22}" + "".join(f"{v:>12,.2f}" for v in (value, *values)) + ratios)


@dataclass(frozen=True)
class Data:
    """Where a server stores its rows. `is_empty` returns whether no row of any job is left.
    `rows_read` returns how many rows of tasks the database has read so far; it is NaN where the
    database does not count them."""

    environ: Mapping[str, str]
    is_empty: Callable[[], bool]
    rows_read: Callable[[], float] = lambda: nan


OpenEngine = Callable[[Path], AbstractContextManager[Data]]
_ANY_ROW_LEFT = "SELECT " + " OR ".join(
    f"EXISTS (SELECT 1 FROM {table})" for table in ("tasks", "messages", "stats", "runs")
)
_ROWS_READ = """
SELECT sum(coalesce(idx_tup_fetch, 0) + coalesce(seq_tup_read, 0))::bigint
FROM pg_stat_user_tables WHERE relname ~ '^tasks(_|$)' AND relname <> 'task_tables'
"""


@contextmanager
def embedded(folder: Path) -> Iterator[Data]:
    def is_empty() -> bool:
        database = folder / "data" / "conveyor.db"
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30) as connection:
            return not connection.execute(_ANY_ROW_LEFT).fetchone()[0]

    yield Data({}, is_empty)


@contextmanager
def postgres(folder: Path) -> Iterator[Data]:
    with a_postgres(DURABLE) as server:

        def is_empty() -> bool:
            ((is_left,),) = trio.run(execute, server.url, _ANY_ROW_LEFT)
            return not is_left

        def rows_read() -> float:
            time.sleep(IDLE_REPORTED_S)
            ((count,),) = trio.run(execute, server.url, _ROWS_READ)
            return float(str(count))

        yield Data(environ_for(server.url, folder, CONCURRENCY), is_empty, rows_read)


ENGINES: Mapping[str, OpenEngine] = {"embedded": embedded, "postgres": postgres}


def measure_job(url: str, count: int, data: Data) -> dict[str, float]:
    figures: dict[str, float] = {"tasks": count}
    sent = send(url, count)
    figures |= {"send_s": sent.send_s, "accept_s": sent.accept_s}
    job = f"/v1/jobs/{sent.job_id}"
    headers = {"X-API-Key": "bench"}
    with httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
        # A paused job ingests its list, but fetches no page.
        client.post(f"{job}/pause").raise_for_status()
        status_times_s: list[float] = []
        figures["ingest_s"] = seconds_of(lambda: wait_until_ingested(client, job, status_times_s))
        figures["status_ms"] = median(status_times_s) * 1000
        figures["status_ms_most"] = max(status_times_s) * 1000
        figures["status_after_ms"] = median_ms_of(lambda: client.get(job).raise_for_status())
        indexes: list[int] = []
        rows_read = data.rows_read()
        figures["pages_s"] = seconds_of(lambda: indexes.extend(list_indexes(client, job)))
        assert sorted(indexes) == list(range(count)), "not every row exactly once"
        figures["read_per_row"] = (data.rows_read() - rows_read) / count
        figures["rare_page_ms"] = median_ms_of(lambda: get_page(client, job, status="successful"))
        figures["stop_s"] = seconds_of(lambda: client.post(f"{job}/stop").raise_for_status())
        figures["delete_s"] = seconds_of(lambda: client.delete(job).raise_for_status())
        assert client.get(job).status_code == 404
        figures["scrubbed_s"] = seconds_of(lambda: wait_until_deleted(data.is_empty))
    return figures


def seconds_of(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def median_ms_of(work: Callable[[], object]) -> float:
    return median(seconds_of(work) for _ in range(SAMPLES)) * 1000


def wait_until_ingested(client: httpx.Client, job: str, status_times_s: list[float]) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    while time.monotonic() < give_up_at:
        started_at = time.perf_counter()
        run = client.get(job).json()["latest_run"]
        status_times_s.append(time.perf_counter() - started_at)
        if run["ingest_status"] == "done":
            return
        time.sleep(0.1)
    raise TimeoutError("the list is not ingested")


def list_indexes(client: httpx.Client, job: str) -> Iterator[int]:
    cursor: str | None = None
    while True:
        page = get_page(client, job, status="all", cursor=cursor)
        yield from (result["index"] for result in page["results"])
        cursor = page.get("next_cursor")
        if cursor is None:
            return


def get_page(client: httpx.Client, job: str, *, status: str, cursor: str | None = None) -> Any:
    params = {"limit": str(PAGE), "status": status}
    if cursor is not None:
        params["cursor"] = cursor
    answer = client.get(f"{job}/results", params=params)
    return msgspec.json.decode(answer.raise_for_status().content)


def wait_until_deleted(is_empty: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    while time.monotonic() < give_up_at:
        if is_empty():
            return
        time.sleep(0.5)
    raise TimeoutError("a deleted job still has rows")


@contextmanager
def running_server(
    folder: Path, engine: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    log = folder / "server.log"
    environ = {**(engine or {}), "CONVEYOR_DATA_DIR": str(folder / "data"), "CONVEYOR_PORT": "0"}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "conveyor.cli.main", "dev"],
            env={**os.environ, **environ, "CONVEYOR_LOG": "json"},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        yield _address(log, process), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        match = re.search(rb"listening on (http://[^\s\"]+)", log.read_bytes())
        if match is not None:
            return match[1].decode()
        time.sleep(0.05)
    raise RuntimeError(log.read_text())


def peak_rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024
