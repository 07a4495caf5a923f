"""The checkers of secrets: a canary is found wherever it comes up, and nothing else is (I45)."""

from __future__ import annotations

from base64 import b64encode

from conveyor.simulation.backends.storage_dump import StoredItem
from conveyor.simulation.checkers.secrets import (
    no_secret_is_logged,
    no_secret_is_shown,
    no_secret_is_stored,
    no_secret_is_told,
)
from conveyor.simulation.client_history import History
from conveyor.simulation.secret_markers import secret_of
from tests.builders import RUN, a_job, a_task
from tests.simulation.checkers.state_changes import TENANT, a_call, a_delivery, a_moment

SECRET = secret_of(TENANT, "header")
SIGNING = b"thirty-two bytes that sign events"
SIGNED = History(signing_secrets={TENANT: [None, SIGNING]})


def test_a_secret_in_a_row_is_reported() -> None:
    assert list(no_secret_is_stored(a_moment(a_job(), a_task(sealed=SECRET))))
    assert list(no_secret_is_stored(a_moment(a_job(), a_task(sealed="v1.c2VhbGVk")))) == []


def test_a_key_for_signatures_in_a_row_is_reported() -> None:
    text = b64encode(SIGNING).decode()

    assert list(no_secret_is_stored(a_moment(a_job(headers_sealed=text), history=SIGNED)))
    assert list(no_secret_is_stored(a_moment(a_job(headers_sealed="other"), history=SIGNED))) == []


def test_a_secret_in_what_an_engine_holds_beside_its_rows_is_reported() -> None:
    leaks = (
        StoredItem("message", RUN, f"ref {SECRET}".encode()),
        StoredItem("mark", f"{{{SECRET}}}/:marks"),
        StoredItem("body", "key", b"a page about " + SECRET.encode()),
    )

    for leak in leaks:
        assert list(no_secret_is_stored(a_moment(remains=[leak])))
    assert list(no_secret_is_stored(a_moment(remains=[StoredItem("message", RUN, b"a ref")]))) == []


def test_a_secret_in_a_log_is_reported() -> None:
    assert list(no_secret_is_logged(a_moment(history=History(logged=[f"GET with {SECRET}"]))))
    assert list(no_secret_is_logged(a_moment(history=History(logged=["GET"])))) == []


def test_a_secret_in_an_answer_is_reported() -> None:
    hidden, leaking = ({"zenrows_params": {"custom_headers": header}} for header in ("***", SECRET))

    assert list(no_secret_is_shown(a_moment(), a_call(answer=leaking)))
    assert list(no_secret_is_shown(a_moment(), a_call(answer=leaking, status=400)))
    assert list(no_secret_is_shown(a_moment(), a_call(answer=hidden))) == []


def test_a_key_for_signatures_is_shown_by_its_rotation_alone() -> None:
    answer = {"secret": b64encode(SIGNING).decode()}
    rotated = a_call("POST", "/v1/hmac/keys/rotate", answer=answer)
    listed = a_call("GET", "/v1/hmac/keys", answer=answer)

    assert list(no_secret_is_shown(a_moment(history=SIGNED), listed))
    assert list(no_secret_is_shown(a_moment(history=SIGNED), rotated)) == []


def test_a_secret_that_a_receiver_is_told_is_reported() -> None:
    assert list(no_secret_is_told(a_moment(), a_delivery(body=SECRET.encode())))
    assert list(no_secret_is_told(a_moment(), a_delivery(headers={"x-api-key": SECRET})))
    assert list(no_secret_is_told(a_moment(), a_delivery())) == []
