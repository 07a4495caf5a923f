"""Mischief: what clients try that must not work, and what they do at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from conveyor.simulation.clients.client import Client, KnownJob
from conveyor.simulation.environment.fake_internet import POISON
from conveyor.simulation.environment.recording_gateway import RAISES

_HEAD_STARTS_S = (0.0, 0.0, 0.05)

FILTERS = ("all", "successful", "failed", "processing")


async def borrow_a_key(client: Client) -> None:
    """The same request under the same key, from somebody else."""
    calls = [
        call
        for call in client.stage.history.calls
        if call.tenant != client.name and call.key is not None and call.path == "/v1/jobs"
    ]
    if calls:
        await client.send_again(client.random.choice(calls[-20:]))


async def misuse_a_cursor(client: Client) -> None:
    """On another job, or with another filter."""
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
    """To the same job, neither knowing of the other."""
    jobs = [job for job in client.jobs if not job.is_deleted]
    if not jobs:
        return
    job = client.random.choice(jobs[-6:])
    async with trio.open_nursery() as nursery:
        for deed in client.random.choices(_DEEDS, k=2):
            nursery.start_soon(deed, client, job)


async def add_to_a_list_under_way(client: Client) -> None:
    """While the first list of an open job may still be ingested."""
    body = {"tasks": _lines(client, client.random.randint(5, 40)), "status": "open"}
    call = await client.post("/v1/jobs", body)
    if call is not None and call.is_accepted:
        job = client.promised(call, is_open=True)
        await _add(client, job)


async def stop_a_list_under_way(client: Client) -> None:
    """And start over, twice at once: one does, and what was not ingested comes all the same."""
    call = await client.post("/v1/jobs", {"tasks": _lines(client, client.random.randint(20, 60))})
    if call is not None and call.is_accepted:
        job = client.promised(call, is_open=False)
        await _post("stop", client, job)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_post, "rerun", client, job)
            nursery.start_soon(_post, "rerun", client, job)


async def delete_a_list_under_way(client: Client) -> None:
    """While workers have its pages in hand, which must not stay."""
    call = await client.post("/v1/jobs", {"tasks": _lines(client, client.random.randint(5, 30))})
    if call is not None and call.is_accepted:
        job = client.promised(call, is_open=False)
        await trio.sleep(client.random.uniform(0.0, 5.0))
        await delete(client, job)


async def delete_what_another_run_shows(client: Client) -> None:
    """A run whose good results the next one inherits."""
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
        client.stage.history.deleted_jobs.setdefault(job.job_id, call.answered_at)
        await client.get(f"/v1/jobs/{job.job_id}")


async def submit_a_line_that_kills(client: Client) -> None:
    """Submits a task that kills the worker that fetches it. Once per world with faults."""
    is_spared = client.stage.options.is_spared
    if not is_spared and not any(POISON in call.body for call in client.stage.history.calls):
        url = f"https://site1.example/{client.name}/{POISON.decode()}"
        call = await client.post("/v1/jobs", {"tasks": [{"url": url}]})
        if call is not None and call.is_accepted:
            client.promised(call, is_open=False)


async def submit_a_line_that_raises(client: Client) -> None:
    """Its handling raises each time; the lines beside it are good. Twice in a world."""
    calls = [call for call in client.stage.history.calls if RAISES.encode() in call.body]
    if "task" in client.stage.options.neighbours.poisons and len(calls) < 2:
        url = f"https://site1.example/{client.name}{RAISES}{client.new_key()}"
        body = {"tasks": [*_lines(client, 6), {"url": url}]}
        call = await client.post("/v1/jobs", body)
        if call is not None and call.is_accepted:
            client.promised(call, is_open=False)


async def _post(what: str, client: Client, job: KnownJob) -> None:
    await trio.sleep(client.random.choice(_HEAD_STARTS_S))
    await client.post(f"/v1/jobs/{job.job_id}/{what}")


async def _add(client: Client, job: KnownJob) -> None:
    await trio.sleep(client.random.choice(_HEAD_STARTS_S))
    body = {"tasks": _lines(client, 1)}
    call = await client.post(f"/v1/jobs/{job.job_id}/tasks", body)
    if call is not None and call.is_accepted:
        client.stage.history.promises[job.job_id].lines_count += call.json["accepted_tasks"]


def _lines(client: Client, count: int) -> list[dict[str, str]]:
    client.numbers += 1
    base = f"https://site1.example/{client.name}/{client.numbers}"
    return [{"url": f"{base}/{index}"} for index in range(count)]


_DEEDS: tuple[Callable[[Client, KnownJob], Awaitable[None]], ...] = (
    _add,
    _add,
    partial(_post, "close"),
    partial(_post, "rerun"),
    partial(_post, "rerun"),
    partial(_post, "stop"),
)
