"""Measures what the dashboard costs: its first page among many jobs, and a run with many watchers.

The bench starts one `conveyor dev`. It opens the first page with --jobs jobs, and reports the CPU
time of the server and the time to the last byte. Then it fetches the same list without and with
--watchers open pages of its run, each in a session of its own, and compares the pairs.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from bench.million import running_server
from bench.origin import running_origin

KEY = {"X-API-Key": "dev"}
_MODELS = 50  # Jobs that are run; the rows of the others are copies of these.
_VISITS = 30
_TICKS = os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench dashboard", description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--watchers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("first-page", "watchers"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    os.environ |= {
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
        # The bench sends more requests than the default quotas allow.
        "CONVEYOR_QUOTA_REQUESTS_PER_S": "100000",
        "CONVEYOR_QUOTA_STREAMS": "1000",
        "CONVEYOR_QUOTA_LIVE_RUNS": "1000",
        "CONVEYOR_QUOTA_OPEN_JOBS": "100000",
    }
    figures: dict[str, float] = {}
    with running_origin(size_bytes=20_000, think_s=0.05) as site:
        if options.only != "watchers":
            figures |= in_a_folder(first_page, site, options.jobs)
        if options.only != "first-page":
            figures |= in_a_folder(watch, site, options.tasks, options.watchers, options.rounds)
    for name, value in figures.items():
        print(f"{name:34}{value:>12,.2f}")
    if options.json:
        print(msgspec.json.encode({k: round(v, 3) for k, v in figures.items()}).decode())


def in_a_folder(measure: Any, *arguments: Any) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-"))
    try:
        figures: dict[str, float] = measure(folder, *arguments)
        return figures
    finally:
        shutil.rmtree(folder)


def first_page(folder: Path, site: str, count: int) -> dict[str, float]:
    with running_server(folder) as (url, _):
        jobs = [submit(url, site, 20, f"model-{number}") for number in range(_MODELS)]
        for job in jobs:
            wait_for_end(url, job)
    copy_jobs(folder / "data" / "conveyor.db", count - _MODELS)
    with running_server(folder) as (url, pid):
        figures: dict[str, float] = {}
        with httpx.Client(base_url=url) as operator:
            figures |= visit("operator", operator, pid)
        with httpx.Client(base_url=url) as caller:
            sign_in(caller)
            figures |= visit("caller", caller, pid)
    return figures


def visit(role: str, client: httpx.Client, pid: int) -> dict[str, float]:
    """Measures the first page, after a few requests to warm up."""
    for _ in range(5):
        client.get("/ui/").raise_for_status()
    times: list[float] = []
    size = 0
    used = cpu_s(pid)
    for _ in range(_VISITS):
        began_at = time.perf_counter()
        page = client.get("/ui/")
        times.append(time.perf_counter() - began_at)
        size = len(page.raise_for_status().content)
    return {
        f"first page, {role}: wall ms": 1000 * median(times),
        f"first page, {role}: cpu ms": 1000 * (cpu_s(pid) - used) / _VISITS,
        f"first page, {role}: kB": size / 1000,
    }


def sign_in(client: httpx.Client) -> None:
    page = client.get("/ui/signin")
    match = re.search(r'name="token" value="([^"]+)"', page.text)
    assert match is not None
    client.post("/ui/signin", data={"token": match[1], "key": "dev"})


def copy_jobs(path: Path, count: int) -> None:
    """Copies finished jobs with their runs and counters; the ids of the copies are older."""
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    models = [
        (
            job,
            connection.execute("SELECT * FROM runs WHERE job_id = ?", (job["job_id"],)).fetchone(),
        )
        for job in connection.execute("SELECT * FROM jobs")
    ]
    for number in range(count):
        job, run = models[number % len(models)]
        ids = {"job_id": f"01{number:024d}", "run_id": f"02{number:024d}"}
        stats = connection.execute("SELECT * FROM stats WHERE run_id = ?", (run["run_id"],))
        _insert(connection, "jobs", {**dict(job), **ids, "latest_run_id": ids["run_id"]})
        _insert(connection, "runs", {**dict(run), **ids})
        for row in stats.fetchall():
            _insert(connection, "stats", {**dict(row), **ids})
    connection.commit()
    connection.close()


def _insert(connection: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    columns = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
    names = ", ".join(f'"{name}"' for name in columns)
    marks = ", ".join("?" * len(columns))
    values = [row[name] for name in columns]
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)


def submit(url: str, site: str, count: int, name: str) -> str:
    body = {
        "name": name,
        "max_inflight": 200,
        "tasks": [{"url": f"{site}/{name}/{number}"} for number in range(count)],
    }
    reply = httpx.post(f"{url}/v1/jobs", json=body, headers=KEY, timeout=120)
    reply.raise_for_status()
    job_id: str = reply.json()["job_id"]
    return job_id


def run_of(url: str, job: str) -> Any:
    reply = httpx.get(f"{url}/v1/jobs/{job}", headers=KEY, timeout=60)
    return reply.raise_for_status().json()["latest_run"]


def wait_for_end(url: str, job: str) -> Any:
    while not (run := run_of(url, job))["terminal"]:
        time.sleep(0.5)
    return run


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and of its child processes."""
    total = 0
    for task in Path("/proc").glob("[0-9]*/stat"):
        fields = task.read_text().rpartition(")")[2].split()
        if int(task.parent.name) == pid or int(fields[1]) == pid:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def watch(folder: Path, site: str, count: int, watchers: int, rounds: int) -> dict[str, float]:
    plain: list[float] = []
    watched: list[float] = []
    gaps: list[float] = []
    with running_server(folder) as (url, _):
        time_run(url, site, max(1_000, count // 10), "warm-up")
        for number in range(rounds):
            plain.append(time_run(url, site, count, f"plain-{number}"))
            with_pages = Watchers(url, watchers)
            watched.append(time_run(url, site, count, f"watched-{number}", with_pages))
            gaps += with_pages.gaps
    ratios = [one / two for one, two in zip(plain, watched, strict=True)]
    gaps.sort()
    return {
        "unwatched: tasks a second": count / median(plain),
        f"{watchers} pages: tasks a second": count / median(watched),
        f"{watchers} pages: throughput ratio": median(ratios),
        "least ratio": min(ratios),
        "most ratio": max(ratios),
        "s between updates, median": median(gaps),
        "s between updates, 95 %": gaps[int(0.95 * (len(gaps) - 1))],
        "updates a page": len(gaps) / (watchers * rounds),
    }


def time_run(url: str, site: str, count: int, name: str, watchers: Watchers | None = None) -> float:
    job = submit(url, site, count, name)
    began_at = time.perf_counter()
    if watchers is None:
        wait_for_end(url, job)
        return time.perf_counter() - began_at
    with watchers.following(f"/ui/jobs/{job}/runs/{run_of(url, job)['run_id']}"):
        wait_for_end(url, job)
        return time.perf_counter() - began_at


@dataclass(slots=True)
class Watchers:
    """Simulated browsers that follow one page; one thread reads all of them. `gaps` are the seconds
    between two updates of a browser."""

    url: str
    count: int
    gaps: list[float] = field(default_factory=list)

    @contextmanager
    def following(self, page: str) -> Iterator[None]:
        end, ended = socket.socketpair()
        thread = threading.Thread(target=self._read, args=(page, ended))
        thread.start()
        try:
            yield
        finally:
            end.close()
            thread.join()
            ended.close()

    def _read(self, page: str, ended: socket.socket) -> None:
        address = urlsplit(self.url)
        request = (
            f"GET /ui/live?page={quote(page)} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
        ).encode()
        updated_at: dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for _ in range(self.count):
                stream = socket.create_connection((str(address.hostname), address.port or 80))
                stream.sendall(request)
                selector.register(stream, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    stream = key.fileobj  # type: ignore[assignment]
                    if stream is ended:
                        for watcher in updated_at:
                            watcher.close()
                        return
                    data = stream.recv(1 << 18)
                    if not data:
                        selector.unregister(stream)
                    elif b"event: blocks" in data:
                        now = time.perf_counter()
                        if stream in updated_at:
                            self.gaps.append(now - updated_at[stream])
                        updated_at[stream] = now
