"""Kills the owner of the data directory or its helper processes at random moments.

Several callers submit lists meanwhile, with the default quotas. At the end every accepted task must
have ended exactly once: the program's own audit of every run checks it, and so does an auditor that
reads the files of the data directory.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.attack.origin import Site, serve
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running
from tests.e2e.audit import violations

CALLERS_COUNT = 4
PAGES_OF_JOB = 400
LIVE_JOBS_OF_CALLER = 2
SETTLE_S = 180.0


def kill_storm(ground: Ground, report: Report) -> None:
    """Thirty kills, a few seconds apart, of the owner or one of its helpers."""
    kills_count = ground.choose(4, 30)
    randomness = Random(13)
    site = Site(ground.arena.victim_address)
    target = Target(
        ground.python,
        ground.folder,
        dict(ground.arena.environ),
        arguments=("--processes", "2"),
    )
    with serve(site, ground.arena.port), running(target):
        load = Load(target, site)
        for _ in range(kills_count):
            load.top_up(seconds=randomness.uniform(1.0, 5.0))
            _kill_one(target, randomness)
        load.wait_ended()
        audits = [load.audit(job) for job in load.jobs]
        target.end()
    tasks_count = PAGES_OF_JOB * len(load.jobs)
    report.at_least("tasks accepted", tasks_count, PAGES_OF_JOB)
    report.equals("tasks that ended", load.ended_tasks_count, tasks_count)
    report.equals("audits that found a difference", audits.count(False), 0)
    report.equals("disagreements of rows and bodies", len(violations(target.data_dir)), 0)
    report.equals("jobs that a repeated request created twice", load.twins_count, 0)


@dataclass(slots=True)
class Load:
    """The lists of several callers. Each submit is repeated with its Idempotency-Key."""

    target: Target
    site: Site
    jobs: list[tuple[str, str]] = field(default_factory=list)
    ended_tasks_count: int = 0
    twins_count: int = 0

    def top_up(self, seconds: float) -> None:
        """Keeps LIVE_JOBS_OF_CALLER jobs of every caller live for `seconds`."""
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            for number in range(CALLERS_COUNT):
                caller = f"caller-{number}"
                mine = [job for job in self.jobs if job[0] == caller]
                live = [job for job in mine[-LIVE_JOBS_OF_CALLER:] if not self._has_ended(job)]
                if len(live) < LIVE_JOBS_OF_CALLER:
                    self._submit(caller, number=len(mine))
            time.sleep(0.2)

    def wait_ended(self) -> None:
        give_up_at = time.monotonic() + SETTLE_S
        waiting = list(self.jobs)
        while waiting and time.monotonic() < give_up_at:
            waiting = [job for job in waiting if not self._has_ended(job)]
            time.sleep(0.5)
        for caller, job_id in self.jobs:
            stats = self.target.run_of(job_id, caller)["stats"]
            self.ended_tasks_count += stats["completed"]
        for number in range(CALLERS_COUNT):
            self.twins_count += self._count_listed(f"caller-{number}")
        self.twins_count -= len(self.jobs)

    def audit(self, job: tuple[str, str]) -> bool:
        """Returns whether the program's own audit of the job's run finds no difference."""
        caller, job_id = job
        run_id = self.target.run_of(job_id, caller)["run_id"]
        while True:
            answer = self._call("GET", f"/v1/jobs/{job_id}/runs/{run_id}/audit", caller)
            if answer is not None and answer.status_code == 200:
                return bool(answer.json()["ok"])
            time.sleep(1.0)

    def _submit(self, caller: str, number: int) -> None:
        urls = [self.site.url(f"/page/{caller}-{number}-{page}") for page in range(PAGES_OF_JOB)]
        key = {"Idempotency-Key": f"{caller}-{number}"}
        body = {"tasks": [{"url": url} for url in urls]}
        answer = self._call("POST", "/v1/jobs", caller, json=body, headers=key)
        if answer is not None and answer.status_code in (201, 202):
            self.jobs.append((caller, answer.json()["job_id"]))

    def _has_ended(self, job: tuple[str, str]) -> bool:
        caller, job_id = job
        answer = self._call("GET", f"/v1/jobs/{job_id}", caller)
        return answer is not None and answer.is_success and answer.json()["latest_run"]["terminal"]

    def _count_listed(self, caller: str) -> int:
        count, cursor = 0, ""
        while True:
            path = "/v1/jobs?limit=100" + (f"&cursor={cursor}" if cursor else "")
            page = self.target.call("GET", path, caller).json()
            count += len(page["jobs"])
            cursor = page.get("next_cursor")
            if not cursor:
                return count

    def _call(self, method: str, path: str, caller: str, **more: Any) -> httpx.Response | None:
        """Returns None if the server died during the call; `_kill_one` restarts it."""
        try:
            return self.target.call(method, path, caller, **more)
        except httpx.TransportError:
            return None


def _kill_one(target: Target, randomness: Random) -> None:
    assert target.process is not None
    helpers = _children_of(target.process.pid)
    if helpers and randomness.random() < 0.5:
        os.kill(randomness.choice(helpers), signal.SIGKILL)
        return
    target.end()
    target.start()


def _children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []
