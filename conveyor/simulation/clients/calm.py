"""The calm caller: it submits small jobs one after another, to measure whether the service is fair.

Its site answers every request after the same time. What a job takes longer than the first one,
which runs alone, is time that it waited for others (I56).
"""

from __future__ import annotations

import trio

from conveyor.simulation.clients.client import Client
from conveyor.simulation.environment.fake_internet import CALM_SITE

NAME = "calm0"
TASKS_COUNT = 10
PAUSE_S = (1.0, 10.0)
# The other clients start after this time, even if the first job has not ended.
ALONE_S_MAX = 60.0
LOOK_S = 0.5


async def submit_alone(client: Client) -> None:
    """Submits the first small job, before any other client starts, and waits until its run has
    ended."""
    with trio.move_on_after(ALONE_S_MAX):
        while not client.sim.history.small_jobs:
            await _submit(client)
        while (
            client.sim.monitor.check_snapshot().after.runs_by_job[client.jobs[0].job_id][0].ended_at
            is None
        ):
            await trio.sleep(LOOK_S)


async def submit_small_jobs(client: Client) -> None:
    """Submits one small job after another until it is cancelled."""
    while True:
        await trio.sleep(client.random.uniform(*PAUSE_S))
        await _submit(client)


async def _submit(client: Client) -> None:
    base = f"https://{CALM_SITE}/{client.new_key()}"
    body = {"tasks": [{"url": f"{base}/{n}"} for n in range(TASKS_COUNT)]}
    call = await client.post("/v1/jobs", body)
    if call is not None and call.is_accepted:
        known = client.record_accepted(call, is_open=False)
        client.sim.history.small_jobs.append(known.job_id)
