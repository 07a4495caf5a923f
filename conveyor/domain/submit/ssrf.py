"""Which hosts, addresses and ports a fetch may reach: the SSRF rules, as pure tables
(docs/engines.md, Targets).

An address is refused unless it is plainly public. `is_global` alone is not enough: it says yes
to NAT64, v4-compatible and other wrapped forms of private addresses, to cloud metadata services
that live in public ranges, and to IPv6 space that no registry has assigned. So an IPv6 address
must lie in 2000::/3, and every IPv4 address that a translator or a tunnel would find in it is
judged too.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import msgspec

from conveyor.domain.submit.url import Target

WEB_PORTS = frozenset({80, 443})

_METADATA = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",  # EC2, GCP, Azure, OpenStack.
        "169.254.170.2",  # ECS and Fargate task credentials.
        "169.254.170.23",  # EKS pod identity.
        "169.254.169.253",  # The VPC's resolver.
        "169.254.42.42",  # Scaleway.
        "169.254.0.23",  # Tencent.
        "fd00:ec2::254",
        "fd00:ec2::253",
        "fd00:ec2::23",
        "fd20:ce::254",  # GCP over IPv6.
        "fd00:42::42",  # Scaleway over IPv6.
        "100.100.100.200",  # Alibaba.
        "168.63.129.16",  # Azure's wire server, in a public range.
        "192.0.0.192",  # Oracle.
    )
)
_METADATA_V4 = frozenset(int(ip) for ip in _METADATA if isinstance(ip, IPv4Address))
_DENIED_V4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
    )
)
# All of IPv6 that is assigned for use in public; the rest of the space is reserved or private.
_PUBLIC_V6 = IPv6Network("2000::/3")
_DENIED_V6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo, ORCHID and other protocol assignments.
        "2001:db8::/32",
        "2002::/16",  # 6to4.
        "3ffe::/16",  # The retired 6bone.
        "3fff::/20",
    )
)
_TEREDO = IPv6Network("2001::/32")
_SIX_TO_FOUR = IPv6Network("2002::/16")
# Where a translator finds the IPv4 address in the low 32 bits.
_LOW_32_BITS = tuple(
    IPv6Network(text)
    for text in (
        "::/96",  # v4-compatible; ::1 and :: lie here as well.
        "::ffff:0:0/96",  # v4-mapped.
        "::ffff:0:0:0/96",  # v4-translated (SIIT, RFC 2765).
        "64:ff9b::/96",  # NAT64 (RFC 6052).
    )
)
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # NAT64 (RFC 8215), at any length of RFC 6052.
# The first half of an ISATAP interface identifier, with the universal and group bits either way.
_ISATAP = frozenset({0x00005EFE, 0x01005EFE, 0x02005EFE, 0x03005EFE})
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
    ip = _parse_address(address)
    if ip is None:
        return "not an address"
    if isinstance(ip, IPv4Address):
        return _forbidden_v4(ip)
    if ip.ipv4_mapped is not None:
        # The system connects to the IPv4 address itself.
        return _forbidden_v4(ip.ipv4_mapped)
    refusal = _forbidden_everywhere(ip)
    if refusal is not None:
        return refusal
    for embedded in embedded_addresses(ip):
        refusal = _forbidden_v4(embedded)
        if refusal is not None:
            return refusal
    if ip not in _PUBLIC_V6 or any(ip in network for network in _DENIED_V6):
        return "a reserved address"
    return None if ip.is_global else "a private address"


def forbidden_metadata_address(address: str | IPv4Address | IPv6Address) -> str | None:
    """What stays refused even where private targets are allowed."""
    ip = _parse_address(address)
    return "not an address" if ip is None else _forbidden_everywhere(ip)


def embedded_addresses(ip: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that a known translator or tunnel would send a packet for `ip` to."""
    number = int(ip)
    found: list[int] = []
    if any(ip in network for network in _LOW_32_BITS):
        found.append(number)
    if ip in _LOCAL_NAT64:
        found.extend(_translated(number))
    if ip in _SIX_TO_FOUR:
        found.append(number >> 80)
    if ip in _TEREDO:
        # The server as it is, and the client with all bits inverted.
        found.extend((number >> 64, ~number))
    if (number >> 32) & 0xFFFFFFFF in _ISATAP:
        found.append(number)
    return tuple(IPv4Address(each & 0xFFFFFFFF) for each in found)


def _translated(number: int) -> tuple[int, ...]:
    """What stands at each of the places that RFC 6052 has for an IPv4 address (prefixes of 32, 40,
    48, 56, 64 and 96 bits; bits 64 to 71 are passed over), and at MAP's (RFC 7597).
    """
    without_bits_64_to_71 = (number >> 64 << 56) | (number & ((1 << 56) - 1))
    return (
        number >> 64,
        without_bits_64_to_71 >> 48,
        without_bits_64_to_71 >> 40,
        without_bits_64_to_71 >> 32,
        number >> 24,
        number,
        number >> 16,
    )


def _forbidden_everywhere(ip: IPv4Address | IPv6Address) -> str | None:
    """Metadata services and multicast, in every form.

    A network may translate under a prefix of its own, which nobody can know. A metadata service is
    one address among four billion, so no honest address is lost by looking for it under any prefix.
    """
    if ip in _METADATA:
        return "a metadata service"
    if ip.is_multicast:
        return "a multicast address"
    if isinstance(ip, IPv4Address):
        return None
    contained = embedded_addresses(ip)
    if any(_is_metadata(number) for number in (*map(int, contained), *_translated(int(ip)))):
        return "a metadata service"
    if any(embedded.is_multicast for embedded in contained):
        return "a multicast address"
    return None


def _is_metadata(number: int) -> bool:
    return number & 0xFFFFFFFF in _METADATA_V4


def _forbidden_v4(ip: IPv4Address) -> str | None:
    refusal = _forbidden_everywhere(ip)
    if refusal is not None:
        return refusal
    if any(ip in network for network in _DENIED_V4):
        return "a reserved address"
    return None if ip.is_global else "a private address"


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


def _parse_address(address: str | IPv4Address | IPv6Address) -> IPv4Address | IPv6Address | None:
    """The address without its zone: a zone says through which card, and not where to."""
    try:
        ip = ip_address(address) if isinstance(address, str) else address
    except ValueError:
        return None
    return IPv6Address(int(ip)) if isinstance(ip, IPv6Address) else ip
