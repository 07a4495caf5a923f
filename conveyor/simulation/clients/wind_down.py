"""What clients do once faults are over, so that every run can end, and what they read
afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conveyor.simulation.client_history import Call
from conveyor.simulation.clients.actions import page_through
from conveyor.simulation.clients.changes import AMPLE_BUDGET
from conveyor.simulation.clients.client import Client
from conveyor.simulation.environment.fake_internet import KILLING_PATH

_NOT_AGAIN = (KILLING_PATH, b"file_input_id")
"""Requests that are not repeated: one kills a process, and uploaded lists have expired by then."""


async def let_everything_end(client: Client, *, resumes: bool = True) -> None:
    """Closes open jobs, pauses schedules, raises budgets, and resumes paused runs if `resumes` is
    True. All runs that are not paused must then end."""
    for job in await _all_jobs(client):
        path = f"/v1/jobs/{job['job_id']}"
        if job["type"] == "scheduled":
            await client.post(f"{path}/schedule/state", {"schedule_state": "paused"})
        if job["status"] == "open":
            await client.post(f"{path}/close")
        if job.get("budget"):
            await client.reliably("PUT", f"{path}/budget", AMPLE_BUDGET)
        latest = job.get("latest_run")
        is_paused = latest is not None and latest.get("pause_state") == "paused"
        if resumes and is_paused:
            await client.post(f"{path}/resume")


async def page_through_everything(client: Client) -> None:
    """Reads every page of every run that is left, for the checker of I37."""
    for job in await _all_jobs(client):
        call = await client.get(f"/v1/jobs/{job['job_id']}/runs?limit=100")
        for run in call.json["runs"] if call is not None and call.is_accepted else ():
            path = f"/v1/jobs/{job['job_id']}/runs/{run['run_id']}/results"
            results = await page_through(client, path)
            if results is not None:
                task_ids = [result["task_id"] for result in results]
                client.sim.history.paged_runs.append((run["run_id"], task_ids))


async def reuse_an_expired_key(client: Client) -> None:
    """Uses an expired key again, with the same request or with another one. Either must be treated
    as a new request."""
    used = [call for call in client.sim.history.calls if _is_plain_submit(client, call)]
    if used:
        body = json.loads(used[-1].body)
        if client.random.random() < 0.5:
            body["name"] = "another"
        await client.reliably("POST", used[-1].path, body, key=used[-1].key)


async def look_at_expired_bodies(client: Client) -> None:
    """Requests some bodies of every job. Those of jobs that keep results for a day have expired."""
    for job in await _all_jobs(client):
        path = f"/v1/jobs/{job['job_id']}"
        call = await client.get(f"{path}/results?limit=3")
        for result in call.json["results"] if call is not None and call.is_accepted else ():
            await client.once("GET", f"{path}/tasks/{result['task_id']}/content")


def _is_plain_submit(client: Client, call: Call) -> bool:
    is_own = call.tenant == client.name and call.is_accepted and call.key is not None
    is_submit = call.method == "POST" and call.path == "/v1/jobs"
    return is_own and is_submit and not any(part in call.body for part in _NOT_AGAIN)


async def _all_jobs(client: Client) -> list[Mapping[str, Any]]:
    jobs: list[Mapping[str, Any]] = []
    cursor = ""
    while True:
        call = await client.get(f"/v1/jobs?limit=100{cursor}")
        if call is None or not call.is_accepted:
            return jobs
        jobs += call.json["jobs"]
        after = call.json.get("next_cursor")
        if not after:
            return jobs
        cursor = f"&cursor={after}"
