"""What an idempotency key means when it arrives: every state of its stored record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import idempotency, limits
from conveyor.domain.changes import Insert, RecordKey, Update
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.idempotency import (
    First,
    InProgress,
    KeyReusedWithOtherRequest,
    KeyVerdict,
    Replay,
    Request,
)
from conveyor.domain.ids import CallerId
from conveyor.domain.model import IdempotencyRecord
from tests.builders import CALLER, T0, a_record

REQUEST = Request(CALLER, "POST", "/v1/jobs", "key", "fingerprint")
ANSWERED = {"response_status": 201, "response_body": "{}", "claimed_until": 0.0}


def record(**fields: Any) -> IdempotencyRecord:
    return a_record(REQUEST.key_id, **fields)


@pytest.mark.parametrize(
    ("stored_record", "verdict"),
    [
        pytest.param(None, First(), id="no record"),
        pytest.param(record(expires_at=T0 - 1), First(), id="expired"),
        pytest.param(record(expires_at=T0 - 1, **ANSWERED), First(), id="expired with an answer"),
        pytest.param(
            record(expires_at=T0 - 1, fingerprint="other"), First(), id="expired, other request"
        ),
        pytest.param(
            record(fingerprint="other"), KeyReusedWithOtherRequest(), id="other request under way"
        ),
        pytest.param(
            record(fingerprint="other", **ANSWERED),
            KeyReusedWithOtherRequest(),
            id="other answered",
        ),
        pytest.param(record(**ANSWERED), Replay(201, "{}"), id="answered"),
        pytest.param(
            record(claimed_until=T0 + 30), InProgress(limits.IDEMPOTENCY_RETRY_S), id="under way"
        ),
        pytest.param(record(claimed_until=T0 + 0.5), InProgress(0.5), id="almost lapsed"),
        pytest.param(record(claimed_until=T0 - 1), First(), id="its owner was lost"),
        pytest.param(record(claimed_until=0.0), First(), id="released"),
    ],
)
def test_the_verdict_on_a_key_follows_from_its_stored_record(
    stored_record: IdempotencyRecord | None, verdict: KeyVerdict
) -> None:
    assert idempotency.decide(stored_record, REQUEST, now=T0) == verdict


@pytest.mark.parametrize("field", ["expires_at", "claimed_until"])
def test_a_record_is_still_valid_at_the_instant_of_its_expiry(field: str) -> None:
    claimed = {"claimed_until": T0 + 5, "expires_at": T0 + 5, field: T0}

    verdict = idempotency.decide(record(**claimed), REQUEST, now=T0)

    assert isinstance(verdict, InProgress)
    assert verdict.retry_after_s >= 0


def test_a_first_claim_mints_its_subject_and_may_replace_an_expired_record() -> None:
    (write,) = idempotency.claim_key(REQUEST, None, subject="S", owner="me", now=T0).writes

    assert isinstance(write, Insert)
    assert write.over_expired_at == T0
    assert write.row == IdempotencyRecord(
        key_id=REQUEST.key_id,
        caller=CALLER,
        fingerprint="fingerprint",
        subject="S",
        owner="me",
        claimed_until=T0 + limits.IDEMPOTENCY_CLAIM_S,
        expires_at=T0 + limits.IDEMPOTENCY_TTL_S,
    )


def test_taking_over_a_lapsed_claim_keeps_the_subject() -> None:
    lost = record(claimed_until=T0 - 1)

    (write,) = idempotency.claim_key(REQUEST, lost, subject="S", owner="me", now=T0).writes

    assert isinstance(write, Update)
    assert set(write.guard.equals) == {("fingerprint", "fingerprint"), ("response_status", None)}
    assert write.guard.lapsed == ("claimed_until", T0)
    assert write.values == {"owner": "me", "claimed_until": T0 + limits.IDEMPOTENCY_CLAIM_S}


def test_a_stored_answer_is_never_overwritten() -> None:
    (write,) = idempotency.answer(REQUEST, 201, "{}").writes

    assert isinstance(write, Update)
    assert write.key == RecordKey(REQUEST.key_id)
    assert ("response_status", None) in write.guard.equals
    assert write.values == ANSWERED


def test_a_release_needs_the_owner_and_an_unanswered_key() -> None:
    record = a_record(owner="me", claimed_until=T0 + 9)

    (write,) = idempotency.release(record).writes

    assert isinstance(write, Update)
    assert set(write.guard.equals) == {
        ("owner", "me"),
        ("claimed_until", T0 + 9),
        ("response_status", None),
    }
    assert write.values == {"claimed_until": 0.0}


@pytest.mark.parametrize("part", ["caller", "method", "path", "key"])
def test_a_key_is_scoped_by_caller_method_and_path(part: str) -> None:
    fields = {"caller": CALLER, "method": "POST", "path": "/v1/jobs", "key": "key"}

    other = Request(**{**fields, part: CallerId("other")}, fingerprint="fingerprint")  # type: ignore[arg-type]

    assert other.key_id != REQUEST.key_id


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128))
def test_printable_ascii_of_a_bounded_length_is_a_key(key: str) -> None:
    assert idempotency.check_key(key) == key


@pytest.mark.parametrize("key", ["", "x" * 129, "a\nb", "a\tb", "a\x00b", "a\x7fb", "ключ", "é"])
def test_other_text_is_not_a_key(key: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        idempotency.check_key(key)

    assert refusal.value.code == "invalid_idempotency_key"


@given(st.binary(), st.binary())
def test_different_bodies_have_different_fingerprints(one: bytes, other: bytes) -> None:
    prints = idempotency.fingerprint(one), idempotency.fingerprint(other)

    assert (prints[0] == prints[1]) is (one == other)


def test_the_query_is_part_of_the_fingerprint() -> None:
    assert idempotency.fingerprint(b"{}", b"a=1") != idempotency.fingerprint(b"{}", b"a=2")
