"""The actions of clients. To add one, write a function and list it in `ACTIONS` with its weight.

An action may fail in any way that the API allows; its client goes on with the next one.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from conveyor.simulation.clients.adversarial import (
    add_to_a_list_under_way,
    borrow_a_key,
    delete,
    delete_a_list_under_way,
    delete_what_another_run_shows,
    do_two_things_at_once,
    misuse_a_cursor,
    stop_a_list_under_way,
    submit_a_line_that_kills,
    submit_a_line_that_raises,
)
from conveyor.simulation.clients.changes import (
    audit_a_run,
    cancel_a_key_rotation,
    change_a_budget,
    follow_events,
    look_at_the_service,
    make_dry_runs,
    remove_a_webhook,
    replace_a_schedule,
    set_a_webhook,
    submit_under_a_budget,
    try_a_webhook_out,
    watch_a_job,
)
from conveyor.simulation.clients.client import Client
from conveyor.simulation.clients.cross_tenant import request_objects_of_others
from conveyor.simulation.environment.fake_internet import RECEIVER_DOMAIN
from conveyor.simulation.environment.http_exchange import HOST
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.profiles import CLIENT_PROFILES

Action = Callable[[Client], Awaitable[None]]

# The pause between two actions, before it is divided by `client_speed`.
PAUSE_S = (0.0, 15.0)
# Pages grow up to this size, so that a cursor is also used with other page sizes.
_PAGE_ROWS_MAX = 50
# The probability that a paused job is not resumed by the same action.
LEFT_PAUSED_SHARE = 0.3
# The probability that a client reads a job immediately after it was accepted.
READ_AT_ONCE_SHARE = 0.3
SHORT_RETENTION_EVERY = 3
"""About one job of three keeps its results for a day only."""


async def act_forever(client: Client) -> None:
    """Does one drawn action after another until it is cancelled."""
    options = client.sim.options
    often = CLIENT_PROFILES[options.client_profile]
    actions = list(ACTIONS)
    weights = [weight * often.get(candidate.__name__, 1) for candidate, weight in ACTIONS.items()]
    while True:
        (action,) = client.random.choices(actions, weights)
        await action(client)
        await trio.sleep(client.random.uniform(*PAUSE_S) / options.client_speed)


async def submit_a_short_list(client: Client) -> None:
    body = _job(client, _lines(client, client.random.randint(1, 8)))
    await _submit(client, body)


async def submit_a_long_list(client: Client) -> None:
    body = _job(client, _lines(client, client.random.randint(20, 60)))
    await _submit(client, body)


async def submit_with_bad_lines(client: Client) -> None:
    """Submits a list with invalid lines; about a third of them are refused, because the request
    does not ask to skip such lines."""
    bad = [{"url": "ftp://site.example/"}, {"url": "https://site.example/", "method": "BREW"}]
    lines = [*_lines(client, 3), *bad]
    body = _job(client, lines)
    if client.random.random() < 0.7:
        body["on_invalid"] = "skip"
    await _submit(client, body)


async def submit_an_open_job(client: Client) -> None:
    body = _job(client, _lines(client, client.random.randint(0, 5)))
    body["status"] = "open"
    await _submit(client, body)


async def submit_with_host_limits(client: Client) -> None:
    body = _job(client, _lines(client, client.random.randint(4, 12)))
    limit: dict[str, Any] = {"concurrency": client.random.choice((1, 2))}
    if client.random.random() < 0.5:
        limit["rate_per_s"] = client.random.choice((0.5, 2.0))
    body["host_limits"] = limit
    await _submit(client, body)


async def submit_a_scheduled_job(client: Client) -> None:
    body = _job(client, _lines(client, client.random.randint(1, 4)))
    body["type"] = "scheduled"
    overlap = client.random.choice(("skip", "queue"))
    body["schedule"] = {
        "rate": {"every": client.random.randint(1, 4), "unit": "minute"},
        "overlap": overlap,
    }
    await _submit(client, body)


async def upload_a_list(client: Client) -> None:
    """Requests an upload, uploads a list and submits it."""
    answer = await client.post("/v1/job_inputs", {"format": "text"})
    if answer is None or not answer.is_accepted:
        return
    target = answer.json["upload"]["url"]
    has_bad_lines = client.random.random() < 0.3
    client.inputs.append((answer.json["file_input_id"], target, has_bad_lines))
    await _upload(client, target, has_bad_lines=has_bad_lines)
    await submit_an_uploaded_list(client)


async def submit_an_uploaded_list(client: Client) -> None:
    """Submits an uploaded list, and sometimes replaces the uploaded text afterwards, which must
    have no effect."""
    if not client.inputs:
        return
    input_id, target, has_bad_lines = client.random.choice(client.inputs)
    body = _job(client, None)
    body["file_input_id"] = input_id
    if has_bad_lines:
        body["on_invalid"] = "skip"
    await _submit(client, body)
    if client.sim.faults.occurs(Fault.LIST_OVERWRITTEN):
        await _upload(client, target, has_bad_lines=has_bad_lines)


async def add_a_list(client: Client) -> None:
    job = client.pick(lambda job: job.is_open)
    if job is None:
        return
    is_last = client.random.random() < 0.3
    lines = _lines(client, client.random.choice((1, 3, 25)))
    body: dict[str, Any] = {"tasks": lines, "last_batch": is_last}
    call = await client.post(f"/v1/jobs/{job.job_id}/tasks", body)
    if call is not None and call.is_accepted:
        client.sim.history.accepted_requests[job.job_id].lines_count += call.json["accepted_tasks"]
        job.is_open = job.is_open and not is_last


async def close_a_job(client: Client) -> None:
    job = client.pick(lambda job: job.is_open)
    if job is not None:
        call = await client.post(f"/v1/jobs/{job.job_id}/close")
        job.is_open = call is None or not call.is_accepted


async def stop_a_job(client: Client) -> None:
    job = client.pick()
    if job is not None:
        word = client.random.choice(("stop", "cancel"))
        call = await client.post(f"/v1/jobs/{job.job_id}/{word}")
        if call is not None and call.is_accepted and call.answered_at is not None:
            run_id = call.json["run_id"]
            client.sim.history.stopped_runs.setdefault(run_id, call.answered_at)


async def pause_a_job(client: Client) -> None:
    job = client.pick()
    if job is not None:
        await client.post(f"/v1/jobs/{job.job_id}/pause")
        await trio.sleep(client.random.uniform(0.0, 20.0))
        if client.random.random() > LEFT_PAUSED_SHARE:
            await client.post(f"/v1/jobs/{job.job_id}/resume")


async def rerun_a_job(client: Client) -> None:
    job = client.pick()
    if job is not None:
        query = client.random.choice(("", "?status=failed", "?status=failed,successful"))
        await client.post(f"/v1/jobs/{job.job_id}/rerun{query}")


async def delete_a_job(client: Client) -> None:
    job = client.pick()
    if job is not None:
        await delete(client, job)


async def delete_a_run(client: Client) -> None:
    job = client.pick()
    if job is not None:
        call = await client.get(f"/v1/jobs/{job.job_id}/runs?limit=100")
        if call is not None and call.is_accepted and call.json["runs"]:
            run = client.random.choice(call.json["runs"])
            await client.reliably("DELETE", f"/v1/jobs/{job.job_id}/runs/{run['run_id']}")


async def look_around(client: Client) -> None:
    """Reads the jobs, events, runs and results that a user would look at."""
    await client.get("/v1/jobs?limit=5")
    await client.get("/v1/events")
    job = client.pick()
    if job is not None:
        await client.get(f"/v1/jobs/{job.job_id}")
        await client.get(f"/v1/jobs/{job.job_id}/runs")
        await watch_a_job(client, job.job_id)
        await page_through(client, f"/v1/jobs/{job.job_id}/results")


async def page_through(client: Client, path: str) -> list[Mapping[str, Any]] | None:
    """Reads every page of a list, each page longer than the last; returns None if a request got no
    answer."""
    results: list[Mapping[str, Any]] = []
    cursor, rows = "", client.sim.options.page_rows
    while True:
        call = await client.get(f"{path}?limit={rows}{cursor}")
        if call is None or not call.is_accepted:
            return None
        results += call.json["results"]
        after = call.json.get("next_cursor")
        if not after:
            return results
        cursor, rows = f"&cursor={after}", min(2 * rows, _PAGE_ROWS_MAX)


async def export_a_run(client: Client) -> None:
    job = client.pick()
    if job is None:
        return
    answer = await client.get(f"/v1/jobs/{job.job_id}")
    if answer is None or not answer.is_accepted or "latest_run" not in answer.json:
        return
    run_id = answer.json["latest_run"]["run_id"]
    kind = client.random.choice(("zip", "jsonl", "csv", "warc"))
    path = f"/v1/jobs/{job.job_id}/runs/{run_id}/exports"
    call = await client.post(f"{path}?format={kind}")
    if call is not None and call.is_accepted:
        client.exports.append((job.job_id, run_id, call.json["export_id"]))


async def fetch_an_export(client: Client) -> None:
    if client.exports:
        job_id, run_id, export_id = client.random.choice(client.exports)
        path = f"/v1/jobs/{job_id}/runs/{run_id}/exports/{export_id}"
        await client.get(path)
        await client.get(f"{path}/content")


async def change_a_schedule(client: Client) -> None:
    job = client.pick(lambda job: job.is_scheduled)
    if job is not None:
        state = client.random.choice(("paused", "active"))
        await client.post(f"/v1/jobs/{job.job_id}/schedule/state", {"schedule_state": state})


async def sign_webhooks(client: Client) -> None:
    """Rotates the signing key and completes the rotation."""
    secrets = client.sim.history.signing_secrets.setdefault(client.name, [])
    # Until the answer arrives there may be a key whose secret the client does not know.
    secrets.append(None)
    call = await client.post("/v1/hmac/keys/rotate")
    if call is None or call.status is None:
        return
    secrets.pop()
    if call.is_accepted:
        client.has_signing_key = True
        secrets.append(b64decode(call.json["secret"]))
        await client.post("/v1/hmac/keys/rotate/finalize")


async def redeliver_an_event(client: Client) -> None:
    job = client.pick(lambda job: job.has_webhook)
    if job is not None:
        path = f"/v1/jobs/{job.job_id}/webhook/deliveries"
        call = await client.get(path)
        if call is not None and call.is_accepted and call.json["deliveries"]:
            event = client.random.choice(call.json["deliveries"])
            await client.post(f"{path}/{event['event_id']}/redeliver")


async def look_at_bodies(client: Client) -> None:
    """Reads the bodies and histories of some tasks of a job."""
    job = client.pick()
    if job is None:
        return
    call = await client.get(f"/v1/jobs/{job.job_id}/results?limit=3")
    if call is not None and call.is_accepted:
        for result in call.json["results"]:
            await client.once("GET", f"/v1/jobs/{job.job_id}/tasks/{result['task_id']}/content")
            await client.once("GET", f"/v1/jobs/{job.job_id}/tasks/{result['task_id']}/history")


ACTIONS: Mapping[Action, int] = {
    submit_a_short_list: 8,
    submit_a_long_list: 3,
    submit_with_bad_lines: 2,
    submit_an_open_job: 4,
    submit_a_scheduled_job: 1,
    submit_with_host_limits: 1,
    upload_a_list: 3,
    submit_an_uploaded_list: 1,
    add_a_list: 6,
    close_a_job: 3,
    stop_a_job: 3,
    pause_a_job: 2,
    rerun_a_job: 4,
    delete_a_job: 2,
    delete_a_run: 1,
    look_around: 3,
    export_a_run: 3,
    fetch_an_export: 2,
    change_a_schedule: 1,
    sign_webhooks: 1,
    redeliver_an_event: 1,
    look_at_bodies: 1,
    request_objects_of_others: 1,
    replace_a_schedule: 1,
    submit_under_a_budget: 1,
    change_a_budget: 1,
    set_a_webhook: 1,
    remove_a_webhook: 1,
    try_a_webhook_out: 1,
    cancel_a_key_rotation: 1,
    make_dry_runs: 1,
    audit_a_run: 1,
    follow_events: 1,
    look_at_the_service: 1,
    borrow_a_key: 1,
    misuse_a_cursor: 1,
    do_two_things_at_once: 4,
    add_to_a_list_under_way: 2,
    stop_a_list_under_way: 2,
    delete_a_list_under_way: 1,
    delete_what_another_run_shows: 1,
    submit_a_line_that_kills: 1,
    submit_a_line_that_raises: 2,
}


def _lines(client: Client, count: int) -> list[dict[str, Any]]:
    client.numbers += 1
    base = f"https://site{client.random.randint(1, 3)}.example/{client.name}/{client.numbers}"
    lines: list[dict[str, Any]] = [{"url": f"{base}/{index}"} for index in range(count)]
    if lines and client.sends_secrets():
        headers = {"custom_headers": {"cookie": client.secret("cookie")}}
        lines[-1] |= {"method": "POST", "body": client.secret("body"), "zenrows_params": headers}
    return lines


def _job(client: Client, lines: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    random = client.random
    body: dict[str, Any] = {} if lines is None else {"tasks": list(lines)}
    if lines and client.sends_duplicates():
        body = {"dedup": True, "tasks": _with_repeats(client, lines)}
    if random.random() < 0.5:
        is_signed = client.has_signing_key and random.random() < 0.7
        url = f"https://{client.name}{RECEIVER_DOMAIN}/{random.randint(1, 2)}"
        body["webhook"] = {"url": url, "signature": is_signed}
    if random.random() < 0.3:
        body["max_inflight"] = random.choice((1, 2, 5))
    if random.random() < 0.3:
        body["max_attempts"] = random.choice((1, 2, 5))
    if random.random() < 0.2:
        body["priority"] = random.randint(1, 10)
    if random.random() < 0.1:
        body["zenrows_params"] = {"custom_headers": {"authorization": client.secret("header")}}
    if random.random() < 0.02:
        body["host_limits"] = {"concurrency": 1}
    if client.numbers % SHORT_RETENTION_EVERY == 0:
        body["result_ttl_days"] = 1
    return body


def _with_repeats(client: Client, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The list with about half of its lines changed to repeat an earlier one. The fragment in the
    URL makes no difference to a site, so such a line is still a duplicate."""
    repeated: list[dict[str, Any]] = []
    for line in lines:
        repeated.append({**line})
        other = client.duplicates_random.choice(repeated)
        if client.duplicates_random.random() < 0.5 and other is not repeated[-1]:
            repeated[-1] = {**other, "url": other["url"] + "#again"}
    return repeated


async def _submit(client: Client, body: dict[str, Any]) -> None:
    call = await client.post("/v1/jobs", body)
    if call is not None and call.is_accepted:
        known = client.record_accepted(
            call,
            is_open=body.get("status") == "open",
            is_scheduled=body.get("type") == "scheduled",
        )
        known.has_webhook = "webhook" in body
        if client.random.random() < READ_AT_ONCE_SHARE:
            await client.get(f"/v1/jobs/{known.job_id}")


async def _upload(client: Client, target: str, *, has_bad_lines: bool) -> None:
    lines = _lines(client, client.random.randint(1, 40))
    urls = [line["url"] for line in lines]
    if has_bad_lines:
        urls.insert(client.random.randint(0, len(urls)), "ftp://site.example/")
    text = "\n".join(urls)
    _, is_ours, path = target.partition(f"//{HOST}")
    if is_ours:
        await client.reliably("PUT", path, raw=text.encode())
    else:
        await client.put_into_storage(target, text.encode())
