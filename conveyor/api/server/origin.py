"""Origins: how callers reach this server, and from which address they call
(docs/operations.md, Behind a proxy).

Links carry tokens, so they must point at us. The Host header is the client's word, and so are
forwarded headers unless a proxy that the operator trusts has written them. A link therefore begins
with, in this order: the public URL of the settings; what a trusted proxy says; the Host header, if
it names a loopback address or the very socket that the request came in by; that socket's address.
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
_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_ELEMENT = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+')
_PAIR = re.compile(
    r'\s*(for|host|proto)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))\s*', re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """`public_url` has no slash at its end. Only `proxies` may say how they were reached."""

    public_url: str | None = None
    proxies: tuple[Network, ...] = ()

    def is_proxy(self, address: str) -> bool:
        parsed = _parse_address(address)
        return parsed is not None and any(parsed in network for network in self.proxies)

    def find_client_address(self, scope: Scope) -> str | None:
        """The nearest address on the way to the client that is not a trusted proxy's."""
        peer = _peer_of(scope)
        if peer is None or not self.is_proxy(peer):
            return peer
        nearest = peer
        for hop in reversed(_find_hops(scope)):
            address = _parse_address(hop)
            if address is None:  # Not an address: what stands before it is no better.
                return nearest
            nearest = str(address)
            if not self.is_proxy(nearest):
                return nearest
        return nearest

    def find_base_url(self, scope: Scope) -> str:
        """How a link to this server begins, for the client of this request."""
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
    """Addresses and networks, separated by commas or spaces; ValueError for anything else."""
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
    """The addresses that proxies have noted, the client's first."""
    if chain := _find_header(scope, b"x-forwarded-for"):
        return [hop.strip() for hop in chain.split(",")]
    elements = _ELEMENT.findall(_find_header(scope, b"forwarded"))
    return [_read_pairs(element).get("for", "") for element in elements]


def _read_forwarded(scope: Scope) -> Mapping[str, str]:
    """What the nearest proxy says of the request that it was sent: the last of each list."""
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
    """The values of a header, which proxies may each have added to, as one list."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return ", ".join(value.decode("latin-1") for key, value in headers if key.lower() == name)


def _peer_of(scope: Scope) -> str | None:
    client: tuple[Any, ...] | None = scope.get("client")
    return str(client[0]) if client else None


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address as proxies write it: perhaps in brackets, perhaps with a port behind it."""
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
