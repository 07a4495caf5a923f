"""Tests several processes on one data directory: kills, stops and their owner's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from actors.runtime import Node
from conveyor.process_status import read_snapshot
from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_site, until
from tests.e2e.test_stop import a_silent_site

pytestmark = pytest.mark.slow


def helper_pids(server: Server) -> list[int]:
    """Returns the process ids of the server's worker processes, from /proc."""
    assert server.process is not None
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    return [int(child) for child in children if b"worker" in _command(child)]


def _is_gone(pid: int, server: Server) -> bool | None:
    return pid not in helper_pids(server) or None


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def processes_of(data_dir: Path) -> tuple[Node, ...]:
    tree = read_snapshot(data_dir).tree
    (processes,) = [node for node in tree.children if node.name == "processes"]
    return processes.children


def test_a_killed_worker_process_is_replaced_and_no_task_is_lost(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", arguments=("--processes", "3"))
    server.start()
    try:
        with a_site() as site:
            tasks = [{"url": url} for url in site.urls(1_500)]
            body = {"tasks": tasks, "max_inflight": 30}
            job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
            for _ in range(3):
                victim, *_ = until("helpers", lambda: helper_pids(server) or None)
                until("progress", lambda: site.request_counts.total() > 50 or None)
                os.kill(victim, signal.SIGKILL)
                until("its end", partial(_is_gone, victim, server))
            run = until("the run to end", lambda: server.ended_run(job_id), deadline_s=150)

        assert sum(node.restarts for node in processes_of(tmp_path / "data")) >= 3
        assert run["status"] == "completed"
        assert run["stats"]["completed"] == 1_500
        assert violations(tmp_path / "data") == []
    finally:
        server.kill()


def test_a_stop_releases_the_leases_of_every_process(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", arguments=("--processes", "2"))
    server.start(CONVEYOR_CONCURRENCY="60")
    try:
        with a_silent_site() as port:
            urls = [{"url": f"http://127.0.0.1:{port}/{number}"} for number in range(300)]
            job_id = server.call(
                "POST", "/v1/jobs", json={"tasks": urls, "max_inflight": 60}
            ).json()["job_id"]
            until("both processes to fetch", lambda: _leases(server, job_id) == 60 or None)

            run = server.call("POST", f"/v1/jobs/{job_id}/stop").json()

        assert run["status"] == "stopped"
        assert run["receipt"]["leases"] == 0
        assert violations(tmp_path / "data") == []
    finally:
        server.kill()


def _leases(server: Server, job_id: str) -> int:
    run = server.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
    return int(run["stats"]["inflight"])


def test_worker_processes_end_with_their_owner(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", arguments=("--processes", "2"))
    server.start()
    try:
        (helper,) = until("the helper", lambda: helper_pids(server) or None)
    finally:
        server.kill()

    until("the helper to end", lambda: not Path(f"/proc/{helper}").exists() or None)


def test_a_long_list_is_scraped_by_two_processes(tmp_path: Path) -> None:
    with a_site() as site:
        (tmp_path / "urls.txt").write_text("\n".join(site.urls(2_400)))
        command = [sys.executable, "-m", "conveyor.cli.main", "scrape", "urls.txt", "--json"]
        done = subprocess.run(
            [*command, "-o", "pages", "--processes", "2", "-c", "60"],
            cwd=tmp_path,
            env={**os.environ, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"},
            capture_output=True,
            check=False,
            timeout=120,
        )

    missing = sum(number % 50 == 7 for number in range(2_400))
    summary = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert (summary["successful"], summary["failed"]) == (2_400 - missing, missing)
    assert len(list((tmp_path / "pages").glob("*.html"))) == 2_400 - missing
