"""Webhooks and HMAC keys on the wire: shapes, codes, and who may see what."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from conveyor.domain.changes import RecordKey
from conveyor.domain.ids import CallerId
from conveyor.domain.model import NoticeStatus, Webhook
from conveyor.engines.memory.store import MemoryStore
from conveyor.ports.webhook_sender import Delivered, NotDelivered, Unresolved
from conveyor.usecases import webhook
from conveyor.usecases import webhook as webhooks
from tests.api.world import BERT, World

HOOK = {"url": "https://hooks.example.com/in", "signature": False}
SIGNED = {**HOOK, "signature": True}
KEYS = "/v1/hmac/keys"


async def rotate(world: World, **options: Any) -> Any:
    return (await world.post(f"{KEYS}/rotate", **options)).json


async def an_ended_job(world: World) -> str:
    job = await world.submit(1, webhook=HOOK)
    await world.finish(job)
    job_id: str = job["job_id"]
    return job_id


async def deliver_due(world: World) -> None:
    for notice in await webhook.due(world.env, limit=10):
        ready = await webhook.prepare(world.env, notice)
        if ready is not None:
            await webhook.deliver(world.env, world.receiver, ready)


async def test_a_webhook_is_set_read_and_removed(world: World) -> None:
    job = await world.submit(1)
    path = f"/v1/jobs/{job['job_id']}/webhook"

    before = await world.get(path)
    put = await world.call("PUT", path, HOOK)
    response = await world.get(path)
    inline = (await world.get(f"/v1/jobs/{job['job_id']}")).json["webhook"]
    removed = [(await world.call("DELETE", path)).status for _ in range(2)]

    assert (before.status, before.code) == (404, "not_found")
    assert put.status == 200
    assert put.json == response.json == inline == HOOK
    assert removed == [204, 204]
    assert (await world.get(path)).status == 404


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"url": HOOK["url"]}, "invalid_argument"),
        ({"signature": False}, "invalid_argument"),
        ({**HOOK, "more": 1}, "invalid_argument"),
        ({**HOOK, "url": "http://hooks.example.com/"}, "callback_url_must_be_https"),
        ({**HOOK, "url": "https://10.0.0.1/"}, "callback_url_must_be_https"),
        (SIGNED, "webhook_signing_requires_active_key"),
    ],
)
async def test_a_webhook_is_replaced_as_a_whole_or_refused(
    world: World, body: dict[str, object], code: str
) -> None:
    job = await world.submit(1)
    path = f"/v1/jobs/{job['job_id']}/webhook"

    seen = await world.call("PUT", path, body)

    assert (seen.status, seen.code) == (400, code)
    assert (await world.get(path)).status == 404


async def test_a_refusal_points_to_where_the_webhook_stands(world: World) -> None:
    job = await world.submit(1)
    lines = [{"url": "https://example.com/"}]
    plain = {**HOOK, "url": "http://hooks.example.com/"}

    seen = [
        await world.post("/v1/jobs", {"tasks": lines, "webhook": plain}),
        await world.post("/v1/jobs", {"tasks": lines, "webhook": SIGNED}),
        await world.call("PUT", f"/v1/jobs/{job['job_id']}/webhook", plain),
        await world.post("/v1/webhook/test", SIGNED),
    ]

    pointers = [response.json["errors"][0]["pointer"] for response in seen]
    assert pointers == ["/webhook/url", "/webhook/signature", "/url", "/signature"]


@pytest.mark.parametrize("is_temporary", [True, False])
async def test_a_host_that_leads_nowhere_is_refused_wherever_it_is_named(
    world: World, is_temporary: bool
) -> None:
    job = await world.submit(1)
    world.receiver.unresolved = Unresolved(is_temporary)
    lines = {"tasks": [{"url": "https://example.com/"}], "webhook": HOOK}

    seen = [
        await world.call("PUT", f"/v1/jobs/{job['job_id']}/webhook", HOOK),
        await world.post("/v1/webhook/test", {"url": HOOK["url"]}),
        await world.post("/v1/jobs", lines),
    ]

    assert [(response.status, response.code) for response in seen] == [
        (400, "callback_url_unresolvable")
    ] * 3
    assert all(("Retry-After" in response.headers) == is_temporary for response in seen)
    assert world.receiver.heard == []


async def test_a_moment_without_names_does_not_bind_an_idempotency_key(world: World) -> None:
    lines = {"tasks": [{"url": "https://example.com/"}], "webhook": HOOK}
    key = {"Idempotency-Key": "mine"}
    world.receiver.unresolved = Unresolved(is_temporary=True)

    refused = await world.post("/v1/jobs", lines, headers=key)
    world.receiver.unresolved = None
    accepted = await world.post("/v1/jobs", lines, headers=key)

    assert (refused.status, accepted.status) == (400, 201)


async def test_a_submit_with_a_signature_needs_a_key_and_then_works(world: World) -> None:
    lines = {"tasks": [{"url": "https://example.com/"}], "webhook": SIGNED}

    refused = await world.post("/v1/jobs", lines)
    await rotate(world)
    accepted = await world.post("/v1/jobs", lines)

    assert (refused.status, refused.code) == (400, "webhook_signing_requires_active_key")
    assert accepted.json["webhook"] == SIGNED


async def test_keys_are_rotated_listed_finalized_and_cancelled(world: World) -> None:
    assert (await world.get(KEYS)).json == {}
    nothing = await world.post(f"{KEYS}/rotate/finalize")

    first, second = await rotate(world), await rotate(world)
    pending = await world.post(f"{KEYS}/rotate")
    both = (await world.get(KEYS)).json
    finalized = await world.post(f"{KEYS}/rotate/finalize")
    await rotate(world)
    cancelled = [(await world.call("DELETE", f"{KEYS}/rotate")).status for _ in range(2)]

    assert (nothing.status, nothing.code) == (409, "no_candidate")
    assert (pending.status, pending.code) == (409, "candidate_pending")
    assert both == {"active": without_secret(first), "candidate": without_secret(second)}
    assert finalized.json == {"active_kid": second["kid"], "created_at": second["created_at"]}
    assert cancelled == [204, 204]
    assert (await world.get(KEYS)).json == {"active": without_secret(second)}
    assert len(base64.b64decode(first["secret"], validate=True)) == 32


def without_secret(key: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in key.items() if name != "secret"}


async def test_callers_do_not_see_each_others_keys(world: World) -> None:
    await rotate(world)

    assert (await world.get(KEYS, key=BERT)).json == {}


async def test_a_repeated_rotation_answers_with_the_same_secret_which_is_kept_sealed(
    world: World,
) -> None:
    headers = {"Idempotency-Key": "rotation"}
    first = await world.post(f"{KEYS}/rotate", headers=headers)
    second = await world.post(f"{KEYS}/rotate", headers=headers)
    store = world.engine.store
    assert isinstance(store, MemoryStore)
    (record,) = store._tables[RecordKey].values()

    assert (first.status, first.body) == (second.status, second.body)
    assert "candidate" not in (await world.get(KEYS)).json
    assert first.json["secret"] not in record.response_body


async def test_a_refused_rotation_is_replayed_too(world: World) -> None:
    await rotate(world)
    await rotate(world)
    headers = {"Idempotency-Key": "rotation"}

    seen = [await world.post(f"{KEYS}/rotate", headers=headers) for _ in range(2)]

    assert [response.code for response in seen] == ["candidate_pending"] * 2
    assert seen[0].body == seen[1].body


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Delivered(202), {"delivered": True, "status_code": 202}),
        (
            NotDelivered("http_5xx:500", 500),
            {"delivered": False, "status_code": 500, "error": "http_5xx:500"},
        ),
        (NotDelivered("timeout"), {"delivered": False, "error": "timeout"}),
    ],
)
async def test_a_receiver_is_tried_out_and_its_answer_told(
    world: World, outcome: Delivered | NotDelivered, expected: dict[str, object]
) -> None:
    world.receiver.outcome = outcome

    seen = await world.post("/v1/webhook/test", {"url": HOOK["url"]})

    (message,) = world.receiver.heard
    body = seen.json
    assert seen.status == 200
    assert body.pop("event_id") == message.event_id
    assert body.pop("elapsed_ms") >= 0
    assert body == expected
    assert '"event_type":"webhook.test"' in message.payload
    assert message.secrets == ()


async def test_a_trial_is_signed_where_that_is_asked_for(world: World) -> None:
    rotation = await rotate(world)

    await world.post("/v1/webhook/test", SIGNED)

    (message,) = world.receiver.heard
    assert [secret.kid for secret in message.secrets] == [rotation["kid"]]


async def test_a_trial_that_has_to_be_made_again_is_the_same_event(world: World) -> None:
    webhook, event_id = Webhook("https://hooks.example.com/in"), "01HF7YAT002XS0WYH6KZCNQBY8"
    for _ in range(2):
        await webhooks.send_test(
            world.env, world.receiver, CallerId("anna"), webhook, event_id=event_id
        )
        world.clock.advance(5.0)

    first, second = world.receiver.heard
    assert (first.event_id, first.payload) == (second.event_id, second.payload)


async def test_the_log_shows_every_try_and_an_event_can_be_told_again(world: World) -> None:
    job_id = await an_ended_job(world)
    path = f"/v1/jobs/{job_id}/webhook/deliveries"
    world.receiver.outcome = NotDelivered("http_5xx:503", 503)

    await deliver_due(world)
    (failed,) = (await world.get(path)).json["deliveries"]
    again = await world.post(f"{path}/{failed['event_id']}/redeliver")
    world.receiver.outcome = Delivered(204)
    await deliver_due(world)
    (delivered,) = (await world.get(path)).json["deliveries"]

    assert (failed["status"], failed["last_error"]) == (NoticeStatus.DUE, "http_5xx:503")
    assert failed["next_try_at"] > failed["occurred_at"]
    assert (again.status, again.json["event_id"]) == (202, failed["event_id"])
    assert again.json["next_try_at"] == failed["occurred_at"]
    assert (delivered["status"], delivered["attempts"]) == (NoticeStatus.DELIVERED, 2)
    assert [attempt.get("status_code") for attempt in delivered["tries"]] == [503, 204]
    assert "next_try_at" not in delivered


async def test_an_event_that_is_not_there_cannot_be_told_again(world: World) -> None:
    job_id = await an_ended_job(world)

    for event_id in ("0" * 26, "x", "%2e%2e"):
        seen = await world.post(f"/v1/jobs/{job_id}/webhook/deliveries/{event_id}/redeliver")
        assert (seen.status, seen.code) == (404, "not_found")


async def test_a_cursor_of_another_jobs_log_is_refused(world: World) -> None:
    job_id = await an_ended_job(world)
    await world.post(f"/v1/jobs/{job_id}/rerun")
    page = f"/v1/jobs/{job_id}/webhook/deliveries?limit=1"
    other_id = await an_ended_job(world)
    for run in (await world.get(f"/v1/jobs/{job_id}/runs")).json["runs"][:1]:
        for task in await world.tasks_of(job_id, run["run_id"]):
            await world.succeed(job_id, task)

    first = (await world.get(page)).json
    second = (await world.get(f"{page}&cursor={first['next_cursor']}")).json
    stolen = await world.get(
        f"/v1/jobs/{other_id}/webhook/deliveries?cursor={first['next_cursor']}"
    )

    assert first["deliveries"][0]["run_id"] > second["deliveries"][0]["run_id"]
    assert second["next_cursor"] is None
    assert (stolen.status, stolen.code) == (400, "invalid_cursor")
