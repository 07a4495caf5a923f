"""Authentication: reads the API key header and checks the key in one of two ways
(SPEC.md 5.1)."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from conveyor.domain.errors import ConveyorError, Unauthenticated
from conveyor.domain.ids import CallerId, caller_id

log = logging.getLogger(__name__)

# Bounds the work of hashing an unknown key.
KEY_CHARS_MAX = 256
# A revoked key is accepted for at most this long. A smaller value checks the source more often.
KEYS_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, and the key to forward to the gateway, if it is forwarded."""

    caller: CallerId
    forwarded_key: str | None


class Authenticator(Protocol):
    """Laws:

    - The same key is always the same caller. A key that is not accepted raises Unauthenticated.
    - A caller is accepted as long as its key is accepted. Its links stop working with the key.
    """

    def identify(self, api_key: str) -> Principal: ...

    def lets_in(self, caller: CallerId) -> bool:
        """Whether the key of this caller is accepted now."""


@dataclass(frozen=True, slots=True)
class Passthrough:
    """Accepts any key. The key identifies the caller, and the gateway checks the key."""

    secret: bytes

    def identify(self, api_key: str) -> Principal:
        return Principal(caller_id(api_key, self.secret), api_key)

    def lets_in(self, caller: CallerId) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class KeyList:
    """Accepts only these keys. It compares all digests, each in constant time, so that the time of
    a request says nothing about the keys.
    """

    secret: bytes
    digests: Sequence[bytes]
    callers: frozenset[CallerId]

    @classmethod
    def of(cls, keys: Iterable[str], *, secret: bytes) -> KeyList:
        keys = sorted(keys)
        callers = frozenset(caller_id(key, secret) for key in keys)
        return cls(secret, tuple(_digest(key, secret) for key in keys), callers)

    def identify(self, api_key: str) -> Principal:
        given = _digest(api_key, self.secret)
        matches = [hmac.compare_digest(given, known) for known in self.digests]
        if not any(matches):
            raise Unauthenticated("The API key is not known here.")
        return Principal(caller_id(api_key, self.secret), None)

    def lets_in(self, caller: CallerId) -> bool:
        return caller in self.callers


class KeySource(Protocol):
    """The source of the keys. `stamp` changes with them. `load` may raise ConveyorError."""

    def stamp(self) -> object: ...

    def load(self) -> frozenset[str]: ...


class WatchedKeys:
    """The keys of a source. A request reads the stamp again, at most once a second.

    If the source cannot be read, the last known keys stay in force and an error is logged.
    """

    def __init__(
        self, source: KeySource, *, secret: bytes, now_s: Callable[[], float] = trio.current_time
    ) -> None:
        self._source = source
        self._secret = secret
        self._now_s = now_s
        self._stamp = source.stamp()
        self._keys = KeyList.of(source.load(), secret=secret)
        self._looked_at_s = now_s()

    def identify(self, api_key: str) -> Principal:
        return self._current().identify(api_key)

    def lets_in(self, caller: CallerId) -> bool:
        return self._current().lets_in(caller)

    def _current(self) -> KeyList:
        now_s = self._now_s()
        if now_s >= self._looked_at_s + KEYS_LOOK_S:
            self._looked_at_s = now_s
            stamp = self._source.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._load()
        return self._keys

    def _load(self) -> None:
        try:
            self._keys = KeyList.of(self._source.load(), secret=self._secret)
        except ConveyorError as error:
            cause: str | None = str(error)
        else:
            cause = None
        if cause is None:
            log.info("API keys reloaded", extra={"count": len(self._keys.digests)})
        else:
            log.error(
                "API keys not reloaded: the previous ones stay in force", extra={"cause": cause}
            )


def read_key(values: Sequence[str]) -> str:
    """Returns the API key from the values of the X-API-Key header, or raises Unauthenticated."""
    if not values:
        raise Unauthenticated("Send your API key in the X-API-Key header.")
    key = values[0]
    well_formed = key.isascii() and key.isprintable() and 0 < len(key) <= KEY_CHARS_MAX
    if len(values) > 1 or not well_formed or key != key.strip():
        raise Unauthenticated(f"An API key is 1 to {KEY_CHARS_MAX} printable ASCII characters.")
    return key


def _digest(key: str, secret: bytes) -> bytes:
    return hmac.digest(secret, b"key list\n" + key.encode(), hashlib.sha256)
