"""Signatures that receivers verify with the SDK or as Standard Webhooks specifies."""

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


def secrets_by_kid(*secrets: Secret) -> dict[str, str]:
    """The secrets as the API returns them, by key id."""
    return {secret.kid: base64.b64encode(secret.key).decode() for secret in secrets}


def is_standard(mark: str, secret: Secret, at: str) -> bool:
    """Checks the signature as the Standard Webhooks specification tells receivers to."""
    version, _, signature = mark.partition(",")
    content = b"EVENT." + at.encode() + b"." + BODY
    return version == "v1" and base64.b64decode(signature) == hmac.digest(
        secret.key, content, hashlib.sha256
    )


def test_the_verifier_of_the_sdk_accepts_the_signature() -> None:
    header = sign(ACTIVE)["X-Signature"]

    assert verify_webhook_signature(BODY, header, secrets_by_kid(ACTIVE), now=T0 + 299)
    assert not verify_webhook_signature(BODY + b" ", header, secrets_by_kid(ACTIVE), now=T0)
    assert not verify_webhook_signature(BODY, header, secrets_by_kid(ACTIVE), now=T0 + 301)


def test_each_attempt_is_signed_with_its_own_time() -> None:
    header = sign(ACTIVE, now=T0 + 86_400)["X-Signature"]

    assert verify_webhook_signature(BODY, header, secrets_by_kid(ACTIVE), now=T0 + 86_400)


def test_a_delivery_also_has_the_headers_of_standard_webhooks() -> None:
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
    assert verify_webhook_signature(BODY, headers["X-Signature"], secrets_by_kid(ACTIVE), now=T0)
    assert verify_webhook_signature(BODY, theirs, secrets_by_kid(CANDIDATE), now=T0)


def test_an_unsigned_delivery_has_an_id_and_no_signature() -> None:
    assert set(sign()) == {"webhook-id", "webhook-timestamp"}


def test_a_secret_is_not_shown_by_its_repr() -> None:
    assert "aaaa" not in repr(ACTIVE)
