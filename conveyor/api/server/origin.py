"""Origins: the URL by which callers reach this server, and the addresses of the callers
(docs/operations.md, Behind a proxy).

Links contain tokens, so they must point at this server. The client controls the Host header, and
also the forwarded headers unless a trusted proxy wrote them. A link therefore begins with the first
of these that exists: the public URL of the settings; the host that a trusted proxy reports; the
Host header, if it names a loopback address or the socket that received the request; the address of
that socket.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

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
            told = forwarded.get("host", host)
            if _HOST.fullmatch(told) is not None:
                return f"{scheme if scheme in _SCHEMES else 'http'}://{told}"
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
    told = _read_pairs(elements[-1]) if elements else {}
    for key, name in (("proto", b"x-forwarded-proto"), ("host", b"x-forwarded-host")):
        if value := _find_header(scope, name):
            told[key] = value.rpartition(",")[2].strip()
    return told


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
