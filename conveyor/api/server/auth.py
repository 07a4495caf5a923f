"""The caller of a request: its API key, its address, and the URL under which it reaches this server
(SPEC.md 5.1; docs/operations.md, Behind a proxy).

The key is checked in one of two ways: any key is accepted, or only the keys of a list.

Links contain tokens, so they must point at this server. The client controls the Host header, and
also the forwarded headers unless a trusted proxy wrote them. A link therefore begins with the first
of these that exists: the public URL of the settings; the host that a trusted proxy reports; the
Host header, if it names a loopback address or the socket that received the request; the address of
that socket.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import trio

from conveyor.domain.errors import ConveyorError, Unauthenticated
from conveyor.domain.ids import CallerId, caller_id

log = logging.getLogger(__name__)

# Bounds the work of hashing an unknown key.
KEY_CHARS_MAX = 256
# A revoked key is accepted for at most this long. A smaller value checks the source more often.
KEYS_CHECK_S = 1.0


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
        digest = _digest(api_key, self.secret)
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
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
        self._checked_at_s = now_s()

    def identify(self, api_key: str) -> Principal:
        return self._current().identify(api_key)

    def lets_in(self, caller: CallerId) -> bool:
        return self._current().lets_in(caller)

    def _current(self) -> KeyList:
        now_s = self._now_s()
        if now_s >= self._checked_at_s + KEYS_CHECK_S:
            self._checked_at_s = now_s
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


Scope: TypeAlias = Mapping[str, Any]
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_SCHEMES = frozenset({"http", "https"})
# A host name, or an IPv6 address in brackets, then an optional port.
_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
# RFC 7239: elements are separated by commas, pairs of an element by semicolons. A quoted value may
# contain both, and may escape characters with a backslash.
_ELEMENT = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+')
_PAIR = re.compile(
    r'\s*(for|host|proto)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))\s*', re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """`public_url` has no slash at its end. Only forwarded headers from `proxies` are used."""

    public_url: str | None = None
    proxies: tuple[Network, ...] = ()

    def is_proxy(self, address: str) -> bool:
        parsed = _parse_address(address)
        return parsed is not None and any(parsed in network for network in self.proxies)

    def find_client_address(self, scope: Scope) -> str | None:
        """The last address before this server that does not belong to a trusted proxy."""
        peer = _peer_of(scope)
        if peer is None or not self.is_proxy(peer):
            return peer
        nearest = peer
        for hop in reversed(_find_hops(scope)):
            address = _parse_address(hop)
            if address is None:  # Not an address: earlier hops are not trustworthy either.
                return nearest
            nearest = str(address)
            if not self.is_proxy(nearest):
                return nearest
        return nearest

    def find_base_url(self, scope: Scope) -> str:
        """Returns the start of a link to this server, for the client of this request."""
        if self.public_url is not None:
            return self.public_url
        host = _find_header(scope, b"host")
        peer = _peer_of(scope)
        if peer is not None and self.is_proxy(peer):
            forwarded = _read_forwarded(scope)
            scheme = forwarded.get("proto", "").lower()
            host_seen = forwarded.get("host", host)
            if _HOST.fullmatch(host_seen) is not None:
                return f"{scheme if scheme in _SCHEMES else 'http'}://{host_seen}"
        server = scope.get("server") or ("127.0.0.1", None)
        if _is_own(host, *server):
            return f"http://{host}"
        name = f"[{server[0]}]" if ":" in server[0] else server[0]
        return f"http://{name}" if server[1] is None else f"http://{name}:{server[1]}"


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parses addresses and networks, separated by commas or spaces. Raises ValueError."""
    return tuple(ipaddress.ip_network(word) for word in text.replace(",", " ").split())


def _is_own(host: str, address: str, port: int | None) -> bool:
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    parsed = _parse_address(name)
    if parsed is None:
        return False
    is_same_port = port is None or int(match[2] or 80) == port
    return parsed.is_loopback or (parsed == _parse_address(address) and is_same_port)


def _find_hops(scope: Scope) -> list[str]:
    """The addresses that the proxies recorded, the client's first."""
    if chain := _find_header(scope, b"x-forwarded-for"):
        return [hop.strip() for hop in chain.split(",")]
    elements = _ELEMENT.findall(_find_header(scope, b"forwarded"))
    return [_read_pairs(element).get("for", "") for element in elements]


def _read_forwarded(scope: Scope) -> Mapping[str, str]:
    """The values of the nearest proxy, which are the last of each list."""
    elements = _ELEMENT.findall(_find_header(scope, b"forwarded"))
    values = _read_pairs(elements[-1]) if elements else {}
    for key, name in (("proto", b"x-forwarded-proto"), ("host", b"x-forwarded-host")):
        if value := _find_header(scope, name):
            values[key] = value.rpartition(",")[2].strip()
    return values


def _read_pairs(element: str) -> dict[str, str]:
    matches = (_PAIR.fullmatch(pair) for pair in element.split(";"))
    return {match[1].lower(): match[2] or match[3] or "" for match in matches if match is not None}


def _find_header(scope: Scope, name: bytes) -> str:
    """All values of a header as one list: each proxy may have added a line."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return ", ".join(value.decode("latin-1") for key, value in headers if key.lower() == name)


def _peer_of(scope: Scope) -> str | None:
    client: tuple[Any, ...] | None = scope.get("client")
    return str(client[0]) if client else None


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parses an address as proxies write it: optionally in brackets, optionally with a port."""
    text = text.partition("%")[0]
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
