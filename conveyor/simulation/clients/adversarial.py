"""Actions that must be refused, and actions that happen at the same time on the same job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from conveyor.simulation.clients.client import Client, KnownJob
from conveyor.simulation.environment.fake_internet import KILLING_PATH
from conveyor.simulation.environment.recording_gateway import RAISING_PATH

# How much later than the other one of two simultaneous actions begins.
_HEAD_STARTS_S = (0.0, 0.0, 0.05)

FILTERS = ("all", "successful", "failed", "processing")


async def borrow_a_key(client: Client) -> None:
    """Sends the request of another client again, under the same key, as this client."""
    calls = [
        call
        for call in client.sim.history.calls
        if call.tenant != client.name and call.key is not None and call.path == "/v1/jobs"
    ]
    if calls:
        await client.send_again(client.random.choice(calls[-20:]))


async def misuse_a_cursor(client: Client) -> None:
    """Uses the cursor of one list for another job or with another filter."""
    jobs = [job for job in client.jobs if not job.is_deleted]
    if not jobs:
        return
    job, other = client.random.choice(jobs), client.random.choice(jobs)
    page = await client.get(f"/v1/jobs/{job.job_id}/results?limit=1")
    cursor = page.json.get("next_cursor") if page is not None and page.is_accepted else None
    if cursor:
        path, kind = f"/v1/jobs/{other.job_id}/results", client.random.choice(FILTERS)
        await client.once("GET", f"{path}?limit=1&status={kind}&cursor={cursor}")


async def do_two_things_at_once(client: Client) -> None:
    """Does two drawn actions on the same job at the same time."""
    jobs = [job for job in client.jobs if not job.is_deleted]
    if not jobs:
        return
    job = client.random.choice(jobs[-6:])
    async with trio.open_nursery() as nursery:
        for action in client.random.choices(_SIMULTANEOUS_ACTIONS, k=2):
            nursery.start_soon(action, client, job)


async def add_to_a_list_under_way(client: Client) -> None:
    """Adds a second list while the first list of an open job may still be ingested."""
    body = {"tasks": _lines(client, client.random.randint(5, 40)), "status": "open"}
    call = await client.post("/v1/jobs", body)
    if call is not None and call.is_accepted:
        job = client.record_accepted(call, is_open=True)
        await _add(client, job)


async def stop_a_list_under_way(client: Client) -> None:
    """Stops a job while its list may still be ingested, and requests two reruns at once. Only one
    may start, and it must also have the lines that were not ingested."""
    call = await client.post("/v1/jobs", {"tasks": _lines(client, client.random.randint(20, 60))})
    if call is not None and call.is_accepted:
        job = client.record_accepted(call, is_open=False)
        await _post("stop", client, job)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_post, "rerun", client, job)
            nursery.start_soon(_post, "rerun", client, job)


async def delete_a_list_under_way(client: Client) -> None:
    """Deletes a job while workers fetch its pages; no page may be left."""
    call = await client.post("/v1/jobs", {"tasks": _lines(client, client.random.randint(5, 30))})
    if call is not None and call.is_accepted:
        job = client.record_accepted(call, is_open=False)
        await trio.sleep(client.random.uniform(0.0, 5.0))
        await delete(client, job)


async def delete_what_another_run_shows(client: Client) -> None:
    """Starts a rerun that inherits the successful results of a run, and deletes that run."""
    jobs = [job for job in client.jobs if not job.is_deleted]
    if not jobs:
        return
    path = f"/v1/jobs/{client.random.choice(jobs[-6:]).job_id}"
    answer = await client.get(path)
    latest = answer.json.get("latest_run") if answer is not None and answer.is_accepted else None
    if latest is not None and latest["terminal"]:
        await client.post(f"{path}/rerun?status=failed")
        await client.reliably("DELETE", f"{path}/runs/{latest['run_id']}")


async def delete(client: Client, job: KnownJob) -> None:
    job.is_deleted = True
    call = await client.reliably("DELETE", f"/v1/jobs/{job.job_id}")
    if call is not None and call.is_accepted and call.answered_at is not None:
        client.sim.history.deleted_jobs.setdefault(job.job_id, call.answered_at)
        await client.get(f"/v1/jobs/{job.job_id}")


async def submit_a_line_that_kills(client: Client) -> None:
    """Submits a task that kills the worker that fetches it, at most once per world and only with
    faults."""
    is_fault_free = client.sim.options.is_fault_free
    if not is_fault_free and not any(
        KILLING_PATH in call.body for call in client.sim.history.calls
    ):
        url = f"https://site1.example/{client.name}/{KILLING_PATH.decode()}"
        call = await client.post("/v1/jobs", {"tasks": [{"url": url}]})
        if call is not None and call.is_accepted:
            client.record_accepted(call, is_open=False)


async def submit_a_line_that_raises(client: Client) -> None:
    """Submits a list with one line whose handler raises each time, beside good lines; at most twice
    per world."""
    calls = [call for call in client.sim.history.calls if RAISING_PATH.encode() in call.body]
    if "task" in client.sim.options.conditions.poisons and len(calls) < 2:
        url = f"https://site1.example/{client.name}{RAISING_PATH}{client.new_key()}"
        body = {"tasks": [*_lines(client, 6), {"url": url}]}
        call = await client.post("/v1/jobs", body)
        if call is not None and call.is_accepted:
            client.record_accepted(call, is_open=False)


async def _post(what: str, client: Client, job: KnownJob) -> None:
    await trio.sleep(client.random.choice(_HEAD_STARTS_S))
    await client.post(f"/v1/jobs/{job.job_id}/{what}")


async def _add(client: Client, job: KnownJob) -> None:
    await trio.sleep(client.random.choice(_HEAD_STARTS_S))
    body = {"tasks": _lines(client, 1)}
    call = await client.post(f"/v1/jobs/{job.job_id}/tasks", body)
    if call is not None and call.is_accepted:
        client.sim.history.accepted_requests[job.job_id].lines_count += call.json["accepted_tasks"]


def _lines(client: Client, count: int) -> list[dict[str, str]]:
    client.numbers += 1
    base = f"https://site1.example/{client.name}/{client.numbers}"
    return [{"url": f"{base}/{index}"} for index in range(count)]


_SIMULTANEOUS_ACTIONS: tuple[Callable[[Client, KnownJob], Awaitable[None]], ...] = (
    _add,
    _add,
    partial(_post, "close"),
    partial(_post, "rerun"),
    partial(_post, "rerun"),
    partial(_post, "stop"),
)
