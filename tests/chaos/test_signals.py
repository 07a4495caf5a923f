"""Kills, pauses and terminates the owner and the worker processes at random, under load.

`CONVEYOR_TEST_CHAOS_S=3600` does so for an hour.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos.client import Client
from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_server, a_site
from tests.e2e.receiver import a_receiver
from tests.e2e.test_processes import helper_pids

pytestmark = pytest.mark.slow

CHAOS_S = float(os.environ.get("CONVEYOR_TEST_CHAOS_S", "20"))
PAUSE_S = float(os.environ.get("CONVEYOR_TEST_PAUSE_S", "2"))
PAGES, JOBS_LIVE = 150, 3
ACTIONS = ("kill a worker", "kill the owner", "pause a worker", "pause the owner", "end the owner")


def test_random_signals_lose_no_task_and_count_no_task_twice(tmp_path: Path) -> None:
    randomness, done = Random(23), Counter[str]()
    data = tmp_path / "data"
    with (
        a_site() as site,
        a_receiver() as receiver,
        a_server(data, ("--processes", "3")) as server,
    ):
        client = Client(server, site, receiver)
        jobs = [_submit(client, randomness) for _ in range(JOBS_LIVE)]
        ends_at = time.monotonic() + CHAOS_S
        while time.monotonic() < ends_at:
            time.sleep(randomness.uniform(0.2, 2.0))
            action = randomness.choice(ACTIONS)
            done[action] += _send_signal(action, server, randomness)
            if sum(_is_live(client, job_id) for job_id in jobs) < JOBS_LIVE:
                jobs.append(_submit(client, randomness))
        for job_id in jobs:
            client.completed(job_id, PAGES)
        runs: list[Any] = [client.get(f"/v1/jobs/{job_id}/runs")["runs"] for job_id in jobs]
        listed = _list_jobs(client)

    print(f"{len(jobs)} jobs, {dict(done)}")
    assert done.total() > 0
    assert [len(run) for run in runs] == [1] * len(jobs)
    assert sorted(listed) == sorted(jobs)
    assert violations(data) == []


def _submit(client: Client, randomness: Random) -> str:
    return client.submit(range(PAGES), max_inflight=randomness.choice((5, 20, 60)))


def _is_live(client: Client, job_id: str) -> bool:
    return not client.get(f"/v1/jobs/{job_id}")["latest_run"]["terminal"]


def _list_jobs(client: Client) -> list[str]:
    job_ids: list[str] = []
    page = client.get("/v1/jobs?limit=100")
    while True:
        job_ids += [job["job_id"] for job in page["jobs"]]
        cursor = page.get("next_cursor")
        if not cursor:
            return job_ids
        page = client.get(f"/v1/jobs?limit=100&cursor={cursor}")


def _send_signal(action: str, server: Server, randomness: Random) -> bool:
    """Sends the signal. Returns whether there was a process to send it to."""
    if server.process is None or server.has_ended():
        return False
    workers = helper_pids(server)
    pids = workers if "worker" in action else [server.process.pid]
    if not pids:
        return False
    pid = randomness.choice(pids)
    try:
        if action.startswith("kill"):
            os.kill(pid, signal.SIGKILL)
        elif action.startswith("end"):
            os.kill(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(randomness.uniform(0.0, PAUSE_S))
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    if pid == server.process.pid and not action.startswith("pause"):
        server.process.wait(60)
    return True
