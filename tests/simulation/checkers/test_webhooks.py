"""The checkers of webhooks (I42, I43)."""

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
from tests.simulation.checkers.state_changes import TENANT, a_delivery, a_moment, promising

SECRET = b"secret of tenant0"


def test_an_event_that_is_told_in_two_ways_is_reported() -> None:
    delivery = a_delivery()

    def found(other: Delivery) -> list[str]:
        history = History(deliveries=[other, delivery])
        return [*one_event_is_one_message(a_moment(history=history), delivery)]

    assert found(a_delivery(body=b'{"other": true}'))
    assert found(a_delivery()) == []
    assert found(a_delivery("ANOTHER")) == []


def test_an_event_before_the_end_that_it_tells_of_is_reported() -> None:
    ended = a_run(status=RunStatus.COMPLETED)

    assert list(no_event_before_its_end(a_moment(a_run()), a_delivery()))
    assert list(no_event_before_its_end(a_moment(ended), a_delivery())) == []


def a_signed(secret: bytes) -> StateChange:
    """One delivery, of an event of the tenant whose key is SECRET."""
    notice = a_notice()
    unsigned = a_delivery(notice.notice_id)
    signed = hmac.digest(secret, f"{notice.notice_id}.7.".encode() + unsigned.body, hashlib.sha256)
    headers = {"webhook-timestamp": "7", "webhook-signature": f"v1,{b64encode(signed).decode()}"}
    history = promising(
        deliveries=[a_delivery(notice.notice_id, headers=headers)],
        signing_secrets={TENANT: [SECRET]},
    )
    return a_moment(notice, history=history)


def test_a_signature_that_no_key_of_the_tenant_made_is_reported() -> None:
    assert list(every_signature_verifies(a_signed(b"another secret")))
    assert list(every_signature_verifies(a_signed(SECRET))) == []
