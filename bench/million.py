"""Does a job of a million lines work from end to end, and in how much memory?

One `conveyor dev` on a fresh data directory, as a person starts it, and one client: submit, watch,
page through every row, ask for one status, stop, delete, and wait until nothing is left of it.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from bench.ingest_variants import send

PAGE = 1_000
GIVE_UP_S = 1_200.0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench million", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-"))
    try:
        with a_server(folder) as (url, pid):
            figures = go_through(url, options.tasks, folder / "data" / "conveyor.db")
            figures["rss_mb"] = peak_rss_mb(pid)
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:22}{value:>12,.2f}")
    if options.json:
        print(msgspec.json.encode({k: round(v, 3) for k, v in figures.items()}).decode())


def go_through(url: str, count: int, database: Path) -> dict[str, float]:
    figures: dict[str, float] = {"tasks": count}
    sent = send(url, count)
    figures |= {"send_s": sent.send_s, "accept_s": sent.accept_s}
    job = f"/v1/jobs/{sent.job_id}"
    headers = {"X-API-Key": "bench"}
    with httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
        client.post(f"{job}/pause").raise_for_status()  # It is ingested, not fetched.
        looks: list[float] = []
        figures["ingest_s"] = seconds_of(lambda: wait_until_in(client, job, looks))
        figures["status_ms"] = median(looks) * 1000
        figures["status_ms_most"] = max(looks) * 1000
        indexes: list[int] = []
        figures["pages_s"] = seconds_of(lambda: indexes.extend(all_rows(client, job)))
        assert sorted(indexes) == list(range(count)), "not every row exactly once"
        figures["rare_page_ms"] = (
            seconds_of(lambda: a_page(client, job, status="successful")) * 1000
        )
        figures["stop_s"] = seconds_of(lambda: client.post(f"{job}/stop").raise_for_status())
        figures["delete_s"] = seconds_of(lambda: client.delete(job).raise_for_status())
        assert client.get(job).status_code == 404
        figures["scrubbed_s"] = seconds_of(lambda: wait_until_gone(database))
    return figures


def seconds_of(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def wait_until_in(client: httpx.Client, job: str, looks: list[float]) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    while time.monotonic() < give_up_at:
        started_at = time.perf_counter()
        run = client.get(job).json()["latest_run"]
        looks.append(time.perf_counter() - started_at)
        if run["ingest_status"] == "done":
            return
        time.sleep(0.1)
    raise TimeoutError("the list is not in")


def all_rows(client: httpx.Client, job: str) -> Iterator[int]:
    cursor: str | None = None
    while True:
        page = a_page(client, job, status="all", cursor=cursor)
        yield from (result["index"] for result in page["results"])
        cursor = page.get("next_cursor")
        if cursor is None:
            return


def a_page(client: httpx.Client, job: str, *, status: str, cursor: str | None = None) -> Any:
    params = {"limit": str(PAGE), "status": status}
    if cursor is not None:
        params["cursor"] = cursor
    answer = client.get(f"{job}/results", params=params)
    return msgspec.json.decode(answer.raise_for_status().content)


def wait_until_gone(database: Path) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30) as connection:
        while time.monotonic() < give_up_at:
            left = [
                connection.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone()[0]
                for table in ("tasks", "messages", "stats", "runs")
            ]
            if not any(left):
                return
            time.sleep(0.5)
    raise TimeoutError("something is left of a deleted job")


@contextmanager
def a_server(folder: Path) -> Iterator[tuple[str, int]]:
    log = folder / "server.log"
    environ = {"CONVEYOR_DATA_DIR": str(folder / "data"), "CONVEYOR_PORT": "0"}
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
