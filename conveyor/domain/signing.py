"""Signatures of webhooks: the contract's header and those of Standard Webhooks
(docs/api.md, Webhooks).

Both name the second at which the try is made, because receivers refuse old ones; id and body
are the same on every try.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secret:
    """An open HMAC key; its bytes stay out of any repr."""

    kid: str
    key: bytes = field(repr=False)


def signature_headers(
    event_id: str, body: bytes, secrets: Sequence[Secret], *, now: float
) -> list[tuple[str, str]]:
    """The headers that name and sign one try; the first secret is the active one.

    A receiver of the contract reads one `kid` from one header: a candidate's signature has a
    header of its own, or which key counts would depend on how the receiver reads duplicates.
    """
    at = str(int(now))
    headers = [("webhook-id", event_id), ("webhook-timestamp", at)]
    if not secrets:
        return headers
    standard = [_standard(secret, event_id, at, body) for secret in secrets]
    headers.append(("webhook-signature", " ".join(standard)))
    names = ("X-Signature", "X-Signature-Candidate")
    return headers + [
        (name, f"t={at},v1={_digest(secret, f'{at}.', body).hex()},kid={secret.kid}")
        for name, secret in zip(names, secrets, strict=False)
    ]


def _standard(secret: Secret, event_id: str, at: str, body: bytes) -> str:
    return "v1," + b64encode(_digest(secret, f"{event_id}.{at}.", body)).decode()


def _digest(secret: Secret, before: str, body: bytes) -> bytes:
    return hmac.digest(secret.key, before.encode() + body, hashlib.sha256)
