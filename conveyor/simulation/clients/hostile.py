"""Hostile callers: they try to harm the service or its other callers.

The service must stay up, serve the other callers, and treat the hostile ones correctly as well. The
options of a world name one kind of hostile caller.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio

from conveyor.simulation.clients.client import Client
from conveyor.simulation.environment.fake_internet import LATE_ANSWER, TAR_PIT
from conveyor.simulation.faults.faults import Fault

NAME = "hostile0"
PAUSE_S = (0.0, 10.0)
AT_ONCE = 4
JOBS_MAX = 40
"""More jobs of one kind would find nothing new, and make the world slow."""

_LONE_SURROGATE = "\ud800"
# Python refuses to convert more than 4300 digits to an integer.
_DIGITS = "9" * 5000
_URL = "https://site1.example/hostile"
# Values that are valid JSON, but that a handler may not expect.
_ODD_PARAMS: tuple[Any, ...] = (
    {"allowed_status_codes": _DIGITS},
    {"allowed_status_codes": "404," * 500},
    {"allowed_status_codes": "٤٠٤"},
    {"allowed_status_codes": 404},
    {"js_render": "true", "wait": _DIGITS},
    {"custom_headers": {"x-injected": "a\r\nb: c"}},
    {"custom_headers": {"": ""}},
    {"proxy_country": _LONE_SURROGATE},
    {_DIGITS: "1"},
)
_ODD_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"max_attempts": 10**30},
    {"max_inflight": -1},
    {"priority": 1e308},
    {"metadata": {"a": _LONE_SURROGATE}},
    {"metadata": {"key": "v" * 100_000}},
    {"name": "\x00\x1b[2J"},
    {"name": _LONE_SURROGATE},
    {"external_id": _DIGITS},
    {"budget": {"credits": 10**40}},
    {"budget": {"cost": "NaN"}},
    {"host_limits": {"rate_per_s": 1e-300}},
    {"host_limits": {"concurrency": 1, "hosts": {_DIGITS: {"concurrency": 1}}}},
    {"type": "scheduled", "schedule": {"cron": "0 0 31 2 *", "timezone": "UTC"}},
    {"type": "scheduled", "schedule": {"cron": "*/0 * * * *", "timezone": "../../etc/passwd"}},
    {"type": "scheduled", "schedule": {"rate": {"every": 10**18, "unit": "day"}}},
    {"type": "scheduled", "schedule": {"at": "9999-12-31T23:59:59", "timezone": "UTC"}},
    {"webhook": {"url": "https://[::1", "signature": False}},
    {"webhook": {"url": "https://a@b@c/" + _LONE_SURROGATE, "signature": False}},
    {"result_ttl_days": 10**12},
)
_ODD_URLS = (
    "https://site1.example/\x00",
    "https://site1.example/" + _LONE_SURROGATE,
    "https://" + "a" * 300 + ".example/",
    "https://xn--a-ecp.example/",
    "https://site1.example:99999/",
    "https://site1.example/?q=" + "%" * 3000,
)
_ODD_TEXTS = (
    b'{"tasks":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"tasks":[{"url":"https://site1.example/"}],"max_attempts":' + b"9" * 6000 + b"}",
    b'{"tasks":[{"url":"https://site1.example/"}],"priority":NaN}',
    b'\xff\xfe{"tasks":[]}',
    b'{"tasks":[{"url":"\\ud800"}]}',
)


async def act_hostile(client: Client) -> None:
    """Does one hostile action after another until it is cancelled."""
    act = KINDS[client.sim.options.conditions.hostile]
    while True:
        if len(client.jobs) < JOBS_MAX:
            await act(client)
        await trio.sleep(client.random.uniform(*PAUSE_S) / client.sim.options.client_speed)


async def send_odd_values(client: Client) -> None:
    """Sends a request with a value that is valid JSON but senseless."""
    client.sim.faults.count(Fault.ODD_VALUES)
    random = client.random
    body: dict[str, Any] = {"tasks": [{"url": f"{_URL}/odd/{client.new_key()}"}]}
    kind = random.randrange(4)
    if kind == 0:
        body["zenrows_params"] = random.choice(_ODD_PARAMS)
    elif kind == 1:
        body |= random.choice(_ODD_FIELDS)
    elif kind == 2:
        body["tasks"][0] = {"url": random.choice(_ODD_URLS)}
    text = random.choice(_ODD_TEXTS) if kind == 3 else json.dumps(body).encode()
    await _submit(client, text)


async def leave_late_answers(client: Client) -> None:
    """Submits requests to a site that answers each of them twice; the second answer arrives when
    the connection is used again."""
    client.sim.faults.count(Fault.LATE_ANSWERS)
    site = client.random.randint(1, 3)
    base = f"https://site{site}.example/hostile/{LATE_ANSWER}/{client.new_key()}"
    lines = [{"url": f"{base}/{n}", "method": "POST", "body": "GET / HTTP/1.1"} for n in range(5)]
    await _submit(client, json.dumps({"tasks": lines}).encode())


async def exceed_quotas(client: Client) -> None:
    """Requests more open jobs, exports and uploads at once than the quotas allow."""
    client.sim.faults.count(Fault.OVER_QUOTAS)
    job = client.pick()
    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(_submit, client, _small_list(client, status="open"))
            nursery.start_soon(_submit, client, _small_list(client))
            nursery.start_soon(client.send_json, "POST", "/v1/job_inputs", b'{"format":"text"}')
            if job is not None:
                nursery.start_soon(_export, client, job.job_id)


async def fill_tar_pits(client: Client) -> None:
    """Submits more requests than workers have slots, to a site that never answers."""
    base = f"https://site1.example/hostile/{TAR_PIT}/{client.new_key()}"
    lines = [{"url": f"{base}/{n}"} for n in range(client.sim.options.concurrency + 10)]
    body = {"tasks": lines, "max_inflight": 500, "max_attempts": 2}
    await _submit(client, json.dumps(body).encode())


async def leave_jobs_open(client: Client) -> None:
    """Submits open jobs to which no list is ever added."""
    client.sim.faults.count(Fault.IDLE_JOBS)
    for _ in range(AT_ONCE):
        await _submit(client, json.dumps({"status": "open", "tasks": []}).encode())


async def rerun_without_end(client: Client) -> None:
    """Requests reruns and exports of one job again and again, whether or not the last one has
    ended."""
    client.sim.faults.count(Fault.ENDLESS_RERUNS)
    job = client.jobs[0] if client.jobs else None
    if job is None:
        await _submit(client, _small_list(client))
        return
    for _ in range(AT_ONCE):
        await client.send_json("POST", f"/v1/jobs/{job.job_id}/rerun", b"")
        await _export(client, job.job_id)


def _small_list(client: Client, **fields: Any) -> bytes:
    url = f"{_URL}/{client.new_key()}"
    return json.dumps({"tasks": [{"url": url}], **fields}).encode()


async def _export(client: Client, job_id: str) -> None:
    answer = await client.once("GET", f"/v1/jobs/{job_id}")
    if answer.is_accepted and "latest_run" in answer.json:
        run_id = answer.json["latest_run"]["run_id"]
        path = f"/v1/jobs/{job_id}/runs/{run_id}/exports?format=jsonl"
        await client.send_json("POST", path, b"")


async def _submit(client: Client, text: bytes) -> None:
    call = await client.send_json("POST", "/v1/jobs", text)
    if call.is_accepted:
        is_open = b'"open"' in text
        client.record_accepted(call, is_open=is_open, is_scheduled=b'"scheduled"' in text)


KINDS: Mapping[str, Callable[[Client], Awaitable[None]]] = {
    "odd_values": send_odd_values,
    "late_answers": leave_late_answers,
    "over_quotas": exceed_quotas,
    "tar_pits": fill_tar_pits,
    "idle_jobs": leave_jobs_open,
    "endless_reruns": rerun_without_end,
}
