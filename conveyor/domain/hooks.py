"""The values around webhooks: the keys that sign them, and tries at delivering one (SPEC 6.6)."""

from __future__ import annotations

import msgspec

from conveyor.domain.ids import CallerId


class SigningKey(msgspec.Struct, frozen=True):
    """One HMAC key; its secret is sealed for its caller and `kid`."""

    kid: str
    created_at: float
    sealed: str


class SigningKeys(msgspec.Struct, frozen=True):
    """A caller's keys: the one that signs, and the one that is to follow it."""

    caller: CallerId
    active: SigningKey
    version: int = 1
    candidate: SigningKey | None = None


class Try(msgspec.Struct, frozen=True, array_like=True):
    """One try at delivering a notice; nothing of what the receiver said is kept but its status."""

    at: float
    duration_s: float
    status: int | None = None
    error: str | None = None
