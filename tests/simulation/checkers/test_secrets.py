"""Tests the checkers of secrets: a marker is found everywhere, and nothing else is (I45)."""

from __future__ import annotations

from base64 import b64encode

from conveyor.simulation.backends.storage_dump import StoredItem
from conveyor.simulation.checkers.secrets import (
    no_secret_is_delivered,
    no_secret_is_logged,
    no_secret_is_shown,
    no_secret_is_stored,
)
from conveyor.simulation.client_history import History
from conveyor.simulation.secret_markers import secret_of
from tests.builders import RUN, a_job, a_task
from tests.simulation.checkers.state_changes import TENANT, a_call, a_delivery, change_to

SECRET = secret_of(TENANT, "header")
SIGNING = b"thirty-two bytes that sign events"
SIGNED = History(signing_secrets={TENANT: [None, SIGNING]})


def test_a_secret_in_a_row_is_reported() -> None:
    assert list(no_secret_is_stored(change_to(a_job(), a_task(sealed=SECRET))))
    assert list(no_secret_is_stored(change_to(a_job(), a_task(sealed="v1.c2VhbGVk")))) == []


def test_a_signing_key_in_a_row_is_reported() -> None:
    text = b64encode(SIGNING).decode()

    assert list(no_secret_is_stored(change_to(a_job(headers_sealed=text), history=SIGNED)))
    assert list(no_secret_is_stored(change_to(a_job(headers_sealed="other"), history=SIGNED))) == []


def test_a_secret_in_a_message_mark_or_body_is_reported() -> None:
    leaks = (
        StoredItem("message", RUN, f"ref {SECRET}".encode()),
        StoredItem("mark", f"{{{SECRET}}}/:marks"),
        StoredItem("body", "key", b"a page about " + SECRET.encode()),
    )

    for leak in leaks:
        assert list(no_secret_is_stored(change_to(stored_items=[leak])))
    assert (
        list(no_secret_is_stored(change_to(stored_items=[StoredItem("message", RUN, b"a ref")])))
        == []
    )


def test_a_secret_in_a_log_is_reported() -> None:
    assert list(no_secret_is_logged(change_to(history=History(logged=[f"GET with {SECRET}"]))))
    assert list(no_secret_is_logged(change_to(history=History(logged=["GET"])))) == []


def test_a_secret_in_an_answer_is_reported() -> None:
    hidden, leaking = ({"zenrows_params": {"custom_headers": header}} for header in ("***", SECRET))

    assert list(no_secret_is_shown(change_to(), a_call(answer=leaking)))
    assert list(no_secret_is_shown(change_to(), a_call(answer=leaking, status=400)))
    assert list(no_secret_is_shown(change_to(), a_call(answer=hidden))) == []


def test_only_the_response_to_a_rotation_may_contain_a_signing_key() -> None:
    answer = {"secret": b64encode(SIGNING).decode()}
    rotated = a_call("POST", "/v1/hmac/keys/rotate", answer=answer)
    listed = a_call("GET", "/v1/hmac/keys", answer=answer)

    assert list(no_secret_is_shown(change_to(history=SIGNED), listed))
    assert list(no_secret_is_shown(change_to(history=SIGNED), rotated)) == []


def test_a_secret_in_a_delivery_is_reported() -> None:
    assert list(no_secret_is_delivered(change_to(), a_delivery(body=SECRET.encode())))
    assert list(no_secret_is_delivered(change_to(), a_delivery(headers={"x-api-key": SECRET})))
    assert list(no_secret_is_delivered(change_to(), a_delivery())) == []
