"""Which hosts, addresses and ports a fetch may reach: the SSRF rules, as pure tables (SPEC 8.2).

An address is refused unless it is plainly public. `is_global` alone is not enough: it says yes
to NAT64, v4-compatible and other wrapped forms of private addresses, and to cloud metadata
services that live in public ranges.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import msgspec

from conveyor.domain.urls import Target

WEB_PORTS = frozenset({80, 443})

_METADATA = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",  # EC2, GCP, Azure, OpenStack.
        "169.254.170.2",  # ECS and Fargate task credentials.
        "169.254.170.23",  # EKS pod identity.
        "169.254.169.253",  # The VPC's resolver.
        "fd00:ec2::254",
        "fd00:ec2::253",
        "fd00:ec2::23",
        "fd20:ce::254",  # GCP over IPv6.
        "100.100.100.200",  # Alibaba.
        "168.63.129.16",  # Azure's wire server, in a public range.
        "192.0.0.192",  # Oracle.
    )
)
_DENIED = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
        "::/96",  # v4-compatible, unspecified and loopback.
        "64:ff9b::/96",  # NAT64.
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",  # Teredo, ORCHID and other protocol assignments.
        "2001:db8::/32",
        "2002::/16",  # 6to4.
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
    )
)
_METADATA_HOSTS = frozenset(
    {
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.goog",
        "metadata.google.internal",
    }
)
_DENIED_SUFFIXES = (
    ".localhost",
    ".localdomain",
    ".local",
    ".internal",
    ".intranet",
    ".lan",
    ".home.arpa",
    ".onion",
)
_DENIED_HOSTS = frozenset(
    {"localhost", "localdomain", "ip6-localhost", "ip6-loopback", "broadcasthost"}
)


class TargetPolicy(msgspec.Struct, frozen=True):
    """What fetches may reach. `allow_private` is for development and tests: it opens every
    port and all but metadata services and multicast. `denied_hosts` are names of our own.
    """

    allow_private: bool = False
    extra_ports: frozenset[int] = frozenset()
    denied_hosts: frozenset[str] = frozenset()

    def forbids_target(self, target: Target) -> str | None:
        """Why `target` may not even be resolved, or None."""
        if target.host in self.denied_hosts:
            return "this host may not be fetched"
        if self.allow_private:
            return _sentence(forbidden_metadata_host(target.host))
        if target.port not in WEB_PORTS and target.port not in self.extra_ports:
            return f"port {target.port} may not be fetched"
        return _sentence(forbidden_host(target.host))

    def forbids_address(self, address: str) -> str | None:
        """Why a socket may not be opened to `address`, or None."""
        if self.allow_private:
            return _sentence(forbidden_metadata_address(address))
        return _sentence(forbidden_address(address))


def _sentence(kind: str | None) -> str | None:
    return None if kind is None else f"the target is {kind}"


def forbidden_address(address: str | IPv4Address | IPv6Address) -> str | None:
    """Why an address is not a public web server's, or None."""
    ip = _unmapped(address)
    if ip is None:
        return "not an address"
    if ip in _METADATA:
        return "a metadata service"
    if ip.is_multicast:
        return "a multicast address"
    if any(ip in network for network in _DENIED if network.version == ip.version):
        return "a reserved address"
    if not ip.is_global:
        return "a private address"
    return None


def forbidden_metadata_address(address: str | IPv4Address | IPv6Address) -> str | None:
    """What stays refused even where private targets are allowed."""
    ip = _unmapped(address)
    if ip is None:
        return "not an address"
    if ip in _METADATA:
        return "a metadata service"
    return "a multicast address" if ip.is_multicast else None


@lru_cache(maxsize=4096)
def forbidden_host(host: str) -> str | None:
    """Why a name is refused before anyone resolves it, or None; `host` comes from parse_url."""
    name = host.removesuffix(".").lower()
    if name in _METADATA_HOSTS:
        return "a metadata service"
    if name in _DENIED_HOSTS or name.endswith(_DENIED_SUFFIXES):
        return "a name of an internal network"
    if _is_literal(name):
        return forbidden_address(name)
    if "." not in name:
        return "a name without a domain"
    return None


@lru_cache(maxsize=4096)
def forbidden_metadata_host(host: str) -> str | None:
    name = host.removesuffix(".").lower()
    if name in _METADATA_HOSTS:
        return "a metadata service"
    return forbidden_metadata_address(name) if _is_literal(name) else None


def _is_literal(name: str) -> bool:
    return ":" in name or name.rpartition(".")[2].isdigit()


def _unmapped(address: str | IPv4Address | IPv6Address) -> IPv4Address | IPv6Address | None:
    try:
        ip = ip_address(address) if isinstance(address, str) else address
    except ValueError:
        return None
    if isinstance(ip, IPv6Address):
        return ip.ipv4_mapped or ip
    return ip
