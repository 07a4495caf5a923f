"""Tests webhooks with the unmodified client, a verifying receiver and killed servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch import (
    WEBHOOK_EVENT_ID_HEADER,
    WEBHOOK_SIGNATURE_HEADER,
    BatchAPIError,
    WebhookEvent,
    ZenRowsBatchClient,
    verify_webhook_signature,
)

from tests.e2e.programs import Server, a_server, a_site, until
from tests.e2e.receiver import Received, a_receiver

pytestmark = pytest.mark.slow


def a_client(server: Server) -> Any:
    return ZenRowsBatchClient("tests", base_url=f"{server.url}/v1")


def is_signed(received: Received, *keys: Any) -> bool:
    secrets = {key.kid: key.secret for key in keys}
    header = received.headers[WEBHOOK_SIGNATURE_HEADER]
    return bool(verify_webhook_signature(received.body, header, secrets))


def refusal_of(call: Callable[[], object]) -> str | None:
    with pytest.raises(BatchAPIError) as caught:
        call()
    code: str | None = caught.value.code
    return code


def test_every_method_of_the_client_for_signing_keys_works(tmp_path: Path) -> None:
    with a_server(tmp_path / "data") as server, a_client(server) as client:
        assert client.list_hmac_keys().active is None
        assert refusal_of(client.finalize_hmac_key) == "no_candidate"

        first, second = client.rotate_hmac_key(), client.rotate_hmac_key()
        both = client.list_hmac_keys()
        pending = refusal_of(client.rotate_hmac_key)
        finalized = client.finalize_hmac_key()
        client.rotate_hmac_key()
        client.cancel_hmac_rotation()
        client.cancel_hmac_rotation()
        left = client.list_hmac_keys()

    assert (both.active.kid, both.candidate.kid) == (first.kid, second.kid)
    assert pending == "candidate_pending"
    assert finalized.active_kid == left.active.kid == second.kid
    assert left.candidate is None


def test_every_method_of_the_client_for_webhooks_works(tmp_path: Path) -> None:
    with a_site() as site, a_server(tmp_path / "data") as server, a_receiver() as receiver:
        signed = {"url": receiver.url, "signature": True}
        with a_client(server) as client:
            unsigned = client.test_webhook({"url": receiver.url})
            no_key = refusal_of(lambda: client.test_webhook(signed))
            active, candidate = client.rotate_hmac_key(), client.rotate_hmac_key()
            tested = client.test_webhook(signed)
            receiver.status = 500
            missed = client.test_webhook(signed)
            receiver.status = 204

            job_id = client.submit_open(webhook={"url": receiver.url}).job_id
            job = client.job(job_id)
            before = client.get_job_webhook(job_id)
            put = client.put_job_webhook(job_id, signed)
            client.delete_job_webhook(job_id)
            none_left = refusal_of(lambda: client.get_job_webhook(job_id))
            client.put_job_webhook(job_id, signed)
            job.add_tasks({"tasks": [{"url": url} for url in site.urls(3)]})
            job.close()
            until("the event", lambda: len(receiver.received) == 4 or None)

    trial, _, _, event = receiver.received
    assert (unsigned.delivered, tested.delivered, tested.status_code) == (True, True, 204)
    assert WEBHOOK_SIGNATURE_HEADER not in trial.headers
    assert no_key == "webhook_signing_requires_active_key"
    assert (missed.delivered, missed.status_code, missed.error) == (False, 500, "http_5xx:500")
    assert (before.signature, put.signature, none_left) == (False, True, "not_found")
    payload = WebhookEvent.model_validate(json.loads(event.body))
    assert (payload.event_type.value, payload.job_id, payload.stats and payload.stats.total) == (
        "run.completed",
        job_id,
        3,
    )
    assert event.headers[WEBHOOK_EVENT_ID_HEADER] == payload.event_id
    assert is_signed(event, active)
    assert len(event.headers["webhook-signature"].split(" ")) == 2
    both = {active.kid: active.secret, candidate.kid: candidate.secret}
    assert verify_webhook_signature(event.body, event.headers["X-Signature-Candidate"], both)


def test_an_event_is_delivered_after_a_kill_of_its_server(tmp_path: Path) -> None:
    """The first process finds no receiver; the second, on the same directory, delivers."""
    with a_receiver() as receiver:
        port, url = receiver.port, receiver.url
    with a_site() as site, a_server(tmp_path / "data") as server:
        with a_client(server) as client:
            key = client.rotate_hmac_key()
        tasks = [{"url": page} for page in site.urls(5)]
        hook = {"url": url, "signature": True}
        job = server.call("POST", "/v1/jobs", json={"tasks": tasks, "webhook": hook}).json()
        log = f"/v1/jobs/{job['job_id']}/webhook/deliveries"

        def latest_delivery() -> Any:
            return next(iter(server.call("GET", log).json()["deliveries"]), None)

        until(
            "a failed attempt", lambda: (event := latest_delivery()) and (event["attempts"] or None)
        )
        server.kill()
        with a_receiver(port) as receiver:
            server.start()
            until("the event", lambda: receiver.received or None)
            event = until(
                "its record", lambda: (e := latest_delivery())["status"] == "delivered" and e
            )
            again = server.call("POST", f"{log}/{event['event_id']}/redeliver")
            until("the event again", lambda: len(receiver.received) == 2 or None)

    first, second = receiver.received
    assert event["tries"][0]["error"] == "transport_error:connection refused"
    assert again.status_code == 202
    assert first.body == second.body
    assert {delivery.headers["webhook-id"] for delivery in (first, second)} == {event["event_id"]}
    assert is_signed(first, key)
    assert is_signed(second, key)


def test_no_file_contains_a_signing_secret_in_plain_text(tmp_path: Path) -> None:
    with a_server(tmp_path / "data") as server, a_receiver() as receiver:
        keys = [
            server.call("POST", "/v1/hmac/keys/rotate", headers={"Idempotency-Key": name}).json()
            for name in ("one", "two")
        ]
        hook = {"url": receiver.url, "signature": True}
        assert server.call("POST", "/v1/webhook/test", json=hook).json()["delivered"]
        server.stop()

    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    deliveries = [
        path.name
        for path in files
        for key in keys
        if key["secret"].rstrip("=").encode() in path.read_bytes()
    ]
    assert len(keys) == 2
    assert any(path.name == "conveyor.db" for path in files)
    assert deliveries == []
