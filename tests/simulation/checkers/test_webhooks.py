"""Tests the checkers of webhooks (I42, I43)."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode

from conveyor.domain.model import RunStatus
from conveyor.simulation.checkers.webhooks import (
    every_signature_verifies,
    no_event_before_its_end,
    one_event_is_one_message,
)
from conveyor.simulation.client_history import Delivery, History
from conveyor.simulation.invariant_monitor import StateChange
from tests.builders import a_notice, a_run
from tests.simulation.checkers.state_changes import (
    TENANT,
    a_delivery,
    change_to,
    with_lines,
)

SECRET = b"secret of tenant0"


def test_two_different_messages_of_one_event_are_reported() -> None:
    delivery = a_delivery()

    def check(other: Delivery) -> list[str]:
        history = History(deliveries=[other, delivery])
        return [*one_event_is_one_message(change_to(history=history), delivery)]

    assert check(a_delivery(body=b'{"other": true}'))
    assert check(a_delivery()) == []
    assert check(a_delivery("ANOTHER")) == []


def test_an_event_before_the_end_of_its_run_is_reported() -> None:
    ended = a_run(status=RunStatus.COMPLETED)

    assert list(no_event_before_its_end(change_to(a_run()), a_delivery()))
    assert list(no_event_before_its_end(change_to(ended), a_delivery())) == []


def a_signed(secret: bytes) -> StateChange:
    """Builds a delivery that is signed with `secret`; the tenant's key is SECRET."""
    notice = a_notice()
    unsigned = a_delivery(notice.notice_id)
    signed = hmac.digest(secret, f"{notice.notice_id}.7.".encode() + unsigned.body, hashlib.sha256)
    headers = {"webhook-timestamp": "7", "webhook-signature": f"v1,{b64encode(signed).decode()}"}
    history = with_lines(
        deliveries=[a_delivery(notice.notice_id, headers=headers)],
        signing_secrets={TENANT: [SECRET]},
    )
    return change_to(notice, history=history)


def test_a_signature_with_another_key_than_the_tenants_is_reported() -> None:
    assert list(every_signature_verifies(a_signed(b"another secret")))
    assert list(every_signature_verifies(a_signed(SECRET))) == []
