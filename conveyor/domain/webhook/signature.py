"""Signatures of webhooks: the contract's header and those of Standard Webhooks
(docs/api.md, Webhooks).

Both contain the second of the attempt, because receivers refuse old signatures. The id and the body
are the same for every attempt.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.domain.changes import Change, Guard, Insert, SigningKeysKey, Update
from conveyor.domain.ids import CallerId
from conveyor.domain.model import SigningKey, SigningKeys

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secret:
    """A decrypted HMAC key. Its repr does not contain its bytes."""

    kid: str
    key: bytes = field(repr=False)


def signature_headers(
    event_id: str, body: bytes, secrets: Sequence[Secret], *, now: float
) -> list[tuple[str, str]]:
    """Returns the headers that identify and sign one attempt. The first secret is the active one.

    A receiver of the contract reads one `kid` from one header. The signature of a candidate has its
    own header, because receivers differ in how they read a repeated header.
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


# The changes of a caller's HMAC keys: create the first, add a candidate, promote or drop it
# (docs/api.md, Webhooks).
#
# Each caller has one row. Its version guards every change, so that one of two concurrent changes is
# refused.


def make_first(caller: CallerId, key: SigningKey) -> Change:
    return Change((Insert(SigningKeysKey(caller), SigningKeys(caller, key)),))


def stage(keys: SigningKeys, key: SigningKey) -> Change:
    """Adds a candidate. It signs in addition to the active key until it is promoted or dropped."""
    return _change(keys, candidate=key)


def promote(keys: SigningKeys) -> Change:
    assert keys.candidate is not None
    return _change(keys, active=keys.candidate, candidate=None)


def drop(keys: SigningKeys) -> Change:
    return _change(keys, candidate=None)


def in_use(keys: SigningKeys) -> tuple[SigningKey, ...]:
    """The keys that sign a delivery, the active one first."""
    return (keys.active,) if keys.candidate is None else (keys.active, keys.candidate)


def _change(keys: SigningKeys, **values: Any) -> Change:
    guard = Guard(equals=(("version", keys.version),))
    return Change((Update(SigningKeysKey(keys.caller), guard, values, {"version": 1}),))
