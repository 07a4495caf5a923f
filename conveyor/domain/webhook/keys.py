"""Values of webhooks: signing keys and delivery attempts
(docs/api.md, Webhooks)."""

from __future__ import annotations

import msgspec

from conveyor.domain.ids import CallerId


class SigningKey(msgspec.Struct, frozen=True):
    """One HMAC key. Its secret is encrypted for its caller and `kid`."""

    kid: str  #: ULID; names the key in signatures.
    created_at: float  #: When the key was created.
    sealed: str  #: The 32 bytes of the key, encrypted.


class SigningKeys(msgspec.Struct, frozen=True):
    """The keys of a caller: the active one, and the candidate that will replace it."""

    caller: CallerId  #: The caller that owns the keys.
    active: SigningKey  #: The key that signs.
    version: int = 1  #: Raised by every change; guards the next one.
    candidate: SigningKey | None = None  #: The key that is to replace the active one.


class DeliveryAttempt(msgspec.Struct, frozen=True, array_like=True):
    """One delivery attempt. Of the receiver's response, only the status is stored."""

    at: float  #: When the attempt began.
    duration_s: float  #: How long it took.
    status: int | None = None  #: The receiver's HTTP status, if it answered.
    error: str | None = None  #: Why it was not a delivery.
