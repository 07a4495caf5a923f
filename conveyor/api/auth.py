"""Who is calling: the one header that says it, and the two ways to judge it (SPEC 8.1)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conveyor.domain.errors import Unauthenticated
from conveyor.domain.ids import CallerId, caller_id

KEY_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, and the key to hand on to the gateway if there is one to hand on."""

    caller: CallerId
    forwarded_key: str | None


class Authenticator(Protocol):
    """Law: the same key is always the same caller; Unauthenticated for a key not let in."""

    def identify(self, api_key: str) -> Principal: ...


@dataclass(frozen=True, slots=True)
class Passthrough:
    """Any key gets in: it names its caller, and the gateway behind us judges it."""

    secret: bytes

    def identify(self, api_key: str) -> Principal:
        return Principal(caller_id(api_key, self.secret), api_key)


@dataclass(frozen=True, slots=True)
class KeyList:
    """Only these keys get in; digests are compared, all of them, each in constant time."""

    secret: bytes
    digests: Sequence[bytes]

    @classmethod
    def of(cls, keys: Iterable[str], *, secret: bytes) -> KeyList:
        return cls(secret, tuple(sorted(_digest(key, secret) for key in keys)))

    def identify(self, api_key: str) -> Principal:
        given = _digest(api_key, self.secret)
        matches = [hmac.compare_digest(given, known) for known in self.digests]
        if not any(matches):
            raise Unauthenticated("The API key is not known here.")
        return Principal(caller_id(api_key, self.secret), None)


def read_key(values: Sequence[str]) -> str:
    """The one well-formed key among the values of the X-API-Key header."""
    if not values:
        raise Unauthenticated("Send your API key in the X-API-Key header.")
    key = values[0]
    well_formed = key.isascii() and key.isprintable() and 0 < len(key) <= KEY_CHARS_MAX
    if len(values) > 1 or not well_formed or key != key.strip():
        raise Unauthenticated(f"An API key is 1 to {KEY_CHARS_MAX} printable ASCII characters.")
    return key


def _digest(key: str, secret: bytes) -> bytes:
    return hmac.digest(secret, b"key list\n" + key.encode(), hashlib.sha256)
