"""Actions that change existing jobs, and actions that only read."""

from __future__ import annotations

from typing import Any

import trio

from conveyor.simulation.clients.client import Client
from conveyor.simulation.environment.fake_internet import RECEIVER_DOMAIN

AMPLE_BUDGET = {"credits": 1_000_000}
"""A budget that no run in a simulated world uses up."""
# Counts are cached for a second: readers poll more often, and for longer.
WATCHED_TIMES = 8
WATCHED_EVERY_S = (0.0, 0.5)


async def replace_a_schedule(client: Client) -> None:
    job = client.pick(lambda job: job.is_scheduled)
    if job is not None:
        schedule: dict[str, Any] = {"overlap": client.random.choice(("skip", "queue"))}
        if client.random.random() < 0.5:
            schedule["rate"] = {"every": client.random.randint(1, 9), "unit": "minute"}
        else:
            schedule |= {"cron": "*/2 * * * *", "timezone": "Europe/Berlin"}
        await client.reliably("PUT", f"/v1/jobs/{job.job_id}/schedule", schedule)


async def submit_under_a_budget(client: Client) -> None:
    """Submits a job with a budget, sometimes so small that the run waits until a client raises
    it."""
    lines = [{"url": f"https://site2.example/{client.new_key()}/{n}"} for n in range(4)]
    spent = {"credits": client.random.choice((1, 3, 1000))}
    call = await client.post("/v1/jobs", {"tasks": lines, "budget": spent})
    if call is not None and call.is_accepted:
        client.record_accepted(call, is_open=False).has_budget = True


async def change_a_budget(client: Client) -> None:
    job = client.pick(lambda job: job.has_budget)
    if job is not None:
        budget = client.random.choice(({"credits": 2}, {"credits": 50}, AMPLE_BUDGET))
        await client.reliably("PUT", f"/v1/jobs/{job.job_id}/budget", budget)


async def set_a_webhook(client: Client) -> None:
    job = client.pick()
    if job is not None:
        webhook = {"url": _receiver(client), "signature": client.has_signing_key}
        call = await client.reliably("PUT", f"/v1/jobs/{job.job_id}/webhook", webhook)
        job.has_webhook |= call is not None and call.is_accepted
        await client.get(f"/v1/jobs/{job.job_id}/webhook")


async def remove_a_webhook(client: Client) -> None:
    job = client.pick(lambda job: job.has_webhook)
    if job is not None:
        job.has_webhook = False
        await client.reliably("DELETE", f"/v1/jobs/{job.job_id}/webhook")


async def try_a_webhook_out(client: Client) -> None:
    webhook = {"url": _receiver(client), "signature": client.has_signing_key}
    await client.post("/v1/webhook/test", webhook)


async def cancel_a_key_rotation(client: Client) -> None:
    await client.get("/v1/hmac/keys")
    await client.reliably("DELETE", "/v1/hmac/keys/rotate")


async def make_dry_runs(client: Client) -> None:
    """Sends requests that create nothing: dry runs and an invalid crawl."""
    lines = [{"url": "https://site1.example/"}, {"url": "ftp://site.example/"}]
    await client.once("POST", "/v1/jobs?dry_run=true", {"tasks": lines})
    await client.once("POST", "/v1/crawls", {"url": "ftp://site.example/"})
    job = client.pick()
    if job is not None:
        await client.once("POST", f"/v1/jobs/{job.job_id}/rerun?status=failed&dry_run=true")


async def audit_a_run(client: Client) -> None:
    """Reads everything that the API shows about a run."""
    job = client.pick()
    if job is None:
        return
    answer = await client.get(f"/v1/jobs/{job.job_id}")
    latest = answer.json.get("latest_run") if answer is not None and answer.is_accepted else None
    if latest is not None:
        path = f"/v1/jobs/{job.job_id}/runs/{latest['run_id']}"
        await client.get(path)
        await client.get(f"{path}/series")
        await client.get(f"{path}/fetches")
        await client.get(f"{path}/audit")


async def follow_events(client: Client) -> None:
    """Reads the events after the last one that this client has seen."""
    after = f"&after={client.last_event}" if client.last_event else ""
    call = await client.get(f"/v1/events?limit=5{after}")
    if call is not None and call.is_accepted:
        client.last_event = call.json["last_id"]


async def look_at_the_service(client: Client) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json", "/v1/quotas", "/v1/crawls"):
        await client.once("GET", path)


async def watch_a_job(client: Client, job_id: str) -> None:
    """Two readers poll one job as dashboards do. This checks counts that several API processes
    cache."""

    async def look_often() -> None:
        for _ in range(WATCHED_TIMES):
            await client.once("GET", f"/v1/jobs/{job_id}")
            await trio.sleep(client.random.uniform(*WATCHED_EVERY_S))

    options = client.sim.options
    if options.engine == "aws" and options.has_redis:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look_often)
            nursery.start_soon(look_often)


def _receiver(client: Client) -> str:
    return f"https://{client.name}{RECEIVER_DOMAIN}/{client.random.randint(1, 2)}"
