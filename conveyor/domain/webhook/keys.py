"""The values around webhooks: the keys that sign them, and tries at delivering one
(docs/api.md, Webhooks)."""

from __future__ import annotations

import msgspec

from conveyor.domain.ids import CallerId


class SigningKey(msgspec.Struct, frozen=True):
    """One HMAC key; its secret is sealed for its caller and `kid`."""

    kid: str  #: ULID; names the key in signatures.
    created_at: float  #: When the key was created.
    sealed: str  #: The 32 bytes of the key, encrypted.


class SigningKeys(msgspec.Struct, frozen=True):
    """A caller's keys: the one that signs, and the one that is to follow it."""

    caller: CallerId  #: The caller that owns the keys.
    active: SigningKey  #: The key that signs.
    version: int = 1  #: Raised by every change; guards the next one.
    candidate: SigningKey | None = None  #: The key that is to replace the active one.


class DeliveryAttempt(msgspec.Struct, frozen=True, array_like=True):
    """One try at delivering a notice; nothing of what the receiver said is kept but its status."""

    at: float  #: When the attempt began.
    duration_s: float  #: How long it took.
    status: int | None = None  #: The receiver's HTTP status, if it answered.
    error: str | None = None  #: Why it was not a delivery.
