"""Signatures that receivers verify: the contract's own verifier, and Standard Webhooks by hand."""

from __future__ import annotations

import base64
import hashlib
import hmac

from zenrows.batch import verify_webhook_signature

from conveyor.domain.webhook import Secret, signature_headers
from tests.builders import T0, a_ulid

ACTIVE, CANDIDATE = Secret(a_ulid(1), b"a" * 32), Secret(a_ulid(2), b"b" * 32)
BODY = '{"é":1}'.encode()


def sign(*secrets: Secret, now: float = T0) -> dict[str, str]:
    return dict(signature_headers("EVENT", BODY, secrets, now=now))


def share_headers(*secrets: Secret) -> dict[str, str]:
    """The secrets as a caller was shown them."""
    return {secret.kid: base64.b64encode(secret.key).decode() for secret in secrets}


def is_standard(mark: str, secret: Secret, at: str) -> bool:
    """As the Standard Webhooks specification tells receivers to check."""
    version, _, signature = mark.partition(",")
    content = b"EVENT." + at.encode() + b"." + BODY
    return version == "v1" and base64.b64decode(signature) == hmac.digest(
        secret.key, content, hashlib.sha256
    )


def test_the_verifier_of_the_sdk_accepts_the_signature() -> None:
    header = sign(ACTIVE)["X-Signature"]

    assert verify_webhook_signature(BODY, header, share_headers(ACTIVE), now=T0 + 299)
    assert not verify_webhook_signature(BODY + b" ", header, share_headers(ACTIVE), now=T0)
    assert not verify_webhook_signature(BODY, header, share_headers(ACTIVE), now=T0 + 301)


def test_each_try_is_signed_for_its_own_moment() -> None:
    header = sign(ACTIVE, now=T0 + 86_400)["X-Signature"]

    assert verify_webhook_signature(BODY, header, share_headers(ACTIVE), now=T0 + 86_400)


def test_the_headers_of_standard_webhooks_are_on_the_same_delivery() -> None:
    headers = sign(ACTIVE)

    assert headers["webhook-id"] == "EVENT"
    assert headers["webhook-timestamp"] == str(int(T0))
    assert is_standard(headers["webhook-signature"], ACTIVE, headers["webhook-timestamp"])


def test_during_a_rotation_both_keys_sign() -> None:
    headers = sign(ACTIVE, CANDIDATE)
    first, second = headers["webhook-signature"].split(" ")
    theirs = headers["X-Signature-Candidate"]

    assert is_standard(first, ACTIVE, headers["webhook-timestamp"])
    assert is_standard(second, CANDIDATE, headers["webhook-timestamp"])
    assert verify_webhook_signature(BODY, headers["X-Signature"], share_headers(ACTIVE), now=T0)
    assert verify_webhook_signature(BODY, theirs, share_headers(CANDIDATE), now=T0)


def test_an_unsigned_delivery_has_an_id_and_no_signature() -> None:
    assert set(sign()) == {"webhook-id", "webhook-timestamp"}


def test_a_secret_does_not_show_itself() -> None:
    assert "aaaa" not in repr(ACTIVE)
