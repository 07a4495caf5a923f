"""Targets of fetches: the one strict URL parser, and the SSRF rules about the hosts, addresses and
ports that a fetch may reach (docs/engines.md, Targets).

The parser is used at submit, at every redirect and at connect, so that the program connects to what
it has checked: no second parser ever reads the text. Userinfo, control characters, spaces,
backslashes and hosts that only look numeric are refused, never repaired. Non-ASCII hosts must pass
strict IDNA 2008 without compatibility mapping, so that full-width digits and ideographic dots
cannot become a loopback address.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum
from functools import lru_cache
from ipaddress import (
    AddressValueError,
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)

import idna
import msgspec

from conveyor.domain import limits

LOCATION_CHARS_MAX = 8192
HOST_CHARS_MAX = 253

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_PATH = r"/[A-Za-z0-9\-._~!$&'()*+,;=:@%/\[\]]*"
_QUERY = r"\?[A-Za-z0-9\-._~!$&'()*+,;=:@%/?\[\]]*"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HOST = rf"(?:{_LABEL}\.)+[a-z]{{2,63}}|(?:{_OCTET}\.){{3}}{_OCTET}"
# Most URLs: lower-case ASCII, last label alphabetic, nothing to repair. Others take the long way.
_PLAIN = re.compile(rf"(https?)://({_HOST})(?::([1-9][0-9]{{0,4}}))?((?:{_PATH})?(?:{_QUERY})?)\Z")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_HOSTNAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\Z")
_NUMERIC_LABEL = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_AUTHORITY_END = re.compile(r"[/?#]")
_PORT = re.compile(r"[1-9][0-9]{0,4}\Z")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\x9f\\\ud800-\udfff]|%0[0ADad]")
_ESCAPED = re.compile(r'["<>^`{|}]|[^\x00-\x7f]+')


class UrlReason(StrEnum):
    """The contract's words for a URL that is refused at submit."""

    MALFORMED_URL = "malformed_url"
    UNSUPPORTED_SCHEME = "unsupported_scheme"
    MISSING_HOST = "missing_host"
    URL_TOO_LONG = "url_too_long"


class BadUrl(msgspec.Struct, frozen=True):
    """Why a text is not a URL that Conveyor will fetch; `detail` never quotes the text."""

    reason: UrlReason
    detail: str


class Target(msgspec.Struct, frozen=True):
    """A checked URL, in the pieces that a connection and a request line need.

    `host` is lower-case ASCII without brackets or a trailing dot; `path_and_query` is ASCII,
    begins with a slash and has no fragment.
    """

    scheme: str
    host: str
    port: int
    path_and_query: str

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    @property
    def is_default_port(self) -> bool:
        return self.port == _DEFAULT_PORTS[self.scheme]

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.is_default_port else f"{host}:{self.port}"

    @property
    def origin(self) -> tuple[str, str, int]:
        return (self.scheme, self.host, self.port)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path_and_query}"


def parse_url(text: str, *, chars_max: int = limits.URL_CHARS_MAX) -> Target | BadUrl:
    """The target that `text` names, or the contract's reason why it names none."""
    if len(text) > chars_max:
        return BadUrl(UrlReason.URL_TOO_LONG, f"the URL is longer than {chars_max} characters")
    plain = _PLAIN.match(text)
    if plain is None or "xn--" in text or "%0" in text:
        return _parse_carefully(text)
    scheme, host, port, tail = plain.groups()
    number = int(port) if port else _DEFAULT_PORTS[scheme]
    if len(host) > HOST_CHARS_MAX or number > 65535:
        return _parse_carefully(text)
    if not tail:
        tail = "/"
    elif tail[0] == "?":
        tail = "/" + tail
    return Target(scheme, host, number, tail)


def host_of(url: str) -> str | None:
    """The host of a URL, as `Target` has it; None for a text that is no URL.

    Rows have such texts: a list may keep its bad lines as failed tasks, which a rerun tries again.
    """
    target = parse_url(url)
    return target.host if isinstance(target, Target) else None


def join(base: Target, location: str) -> Target | BadUrl:
    """Where a redirect from `base` leads. Spaces are escaped: many sites send them."""
    location = location.strip(" \t").replace(" ", "%20")
    if _SCHEME.match(location):
        return parse_url(location, chars_max=LOCATION_CHARS_MAX)
    origin = f"{base.scheme}://{base.authority}"
    reference = location.partition("#")[0]
    if reference.startswith("//"):
        absolute = f"{base.scheme}:{reference}"
    elif reference.startswith("/"):
        absolute = origin + without_dot_segments(reference)
    elif not reference:
        absolute = origin + base.path_and_query
    else:
        path = base.path_and_query.partition("?")[0]
        folder = path if reference.startswith("?") else path.rpartition("/")[0] + "/"
        absolute = origin + without_dot_segments(folder + reference)
    return parse_url(absolute, chars_max=LOCATION_CHARS_MAX)


def _parse_carefully(text: str) -> Target | BadUrl:
    if _FORBIDDEN.search(text):
        return _malformed_url("a space, control character, backslash or escaped line break")
    match = _SCHEME.match(text)
    if match is None:
        return _malformed_url("no scheme")
    scheme = match[1].lower()
    if scheme not in _DEFAULT_PORTS:
        return BadUrl(UrlReason.UNSUPPORTED_SCHEME, "only http and https URLs are fetched")
    rest = text[match.end() :]
    if not rest.startswith("//"):
        return BadUrl(UrlReason.MISSING_HOST, "no host after the scheme")
    authority, tail = _cut_authority(rest[2:])
    return _with_authority(scheme, authority, _escape(tail))


def _with_authority(scheme: str, authority: str, tail: str) -> Target | BadUrl:
    if "@" in authority:
        return _malformed_url("user names and passwords are not taken in URLs")
    host_text, colon, port_text = _cut_port(authority)
    if not host_text:
        return BadUrl(UrlReason.MISSING_HOST, "no host in the URL")
    host = _host_from(host_text)
    if host is None:
        return _malformed_url("the host is not a valid name or a canonical address")
    port = _DEFAULT_PORTS[scheme]
    if colon:
        if not _PORT.match(port_text) or int(port_text) > 65535:
            return _malformed_url("the port is not a number from 1 to 65535")
        port = int(port_text)
    return Target(scheme, host, port, tail)


def _cut_authority(text: str) -> tuple[str, str]:
    """The authority, and the path and query behind it; the fragment is dropped."""
    text = text.partition("#")[0]
    end = _AUTHORITY_END.search(text)
    if end is None:
        return text, "/"
    tail = text[end.start() :]
    return text[: end.start()], tail if tail[0] == "/" else "/" + tail


def _cut_port(authority: str) -> tuple[str, str, str]:
    if authority.startswith("["):
        host, bracket, rest = authority.partition("]")
        if rest and not rest.startswith(":"):
            return authority, "", ""
        return host + bracket, rest[:1], rest[1:]
    return authority.partition(":")


def _host_from(text: str) -> str | None:
    if text.startswith("["):
        return _ipv6_from(text)
    host = text.lower().removesuffix(".")
    if not host.isascii():
        encoded = _idna_from(host)
        if encoded is None:
            return None
        host = encoded
    if len(host) > HOST_CHARS_MAX or not _HOSTNAME.match(host):
        return None
    labels = host.split(".")
    if _NUMERIC_LABEL.match(labels[-1]):
        return _canonical_ipv4(text)
    if any(label.startswith("xn--") and not _is_a_label(label) for label in labels):
        return None
    return host


def _ipv6_from(text: str) -> str | None:
    inner = text[1:-1]
    if not text.endswith("]") or "%" in inner:
        return None
    try:
        return str(IPv6Address(inner))
    except AddressValueError:
        return None


def _canonical_ipv4(text: str) -> str | None:
    """Only the form that every resolver reads alike: no hex, octal, short or mapped digits."""
    try:
        address = str(IPv4Address(text))
    except AddressValueError:
        return None
    return address if address == text else None


def _idna_from(host: str) -> str | None:
    try:
        return idna.encode(unicodedata.normalize("NFC", host), strict=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        return None


def _is_a_label(label: str) -> bool:
    try:
        return idna.alabel(idna.ulabel(label)).decode("ascii") == label
    except (idna.IDNAError, UnicodeError):
        return False


def _escape(tail: str) -> str:
    return _ESCAPED.sub(_percent_encoded, tail)


def _percent_encoded(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def without_dot_segments(reference: str) -> str:
    """Removes dot segments (RFC 3986, 5.2.4) from the path. The query stays as it is."""
    path, mark, query = reference.partition("?")
    if "/." not in path:
        return reference
    resolved: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del resolved[-1:]
        elif segment != ".":
            resolved.append(segment)
    if segments[-1] in {".", ".."}:
        resolved.append("")
    return "/" + "/".join(resolved) + mark + query


def _malformed_url(detail: str) -> BadUrl:
    return BadUrl(UrlReason.MALFORMED_URL, detail)


# The SSRF rules, as pure tables.
#
# An address is refused unless it is plainly public. `is_global` alone is not enough: it is true for
# NAT64, v4-compatible and other wrapped forms of private addresses, for cloud metadata services in
# public ranges, and for IPv6 space that no registry has assigned. So an IPv6 address must lie in
# 2000::/3, and every IPv4 address that a translator or a tunnel would find in it is checked too.


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

    def forbids_receiver(self, url: str, *, chars_max: int = limits.URL_CHARS_MAX) -> str | None:
        """Why this process may not send a webhook or an export to `url`, or None."""
        target = parse_url(url, chars_max=chars_max)
        if isinstance(target, BadUrl):
            return target.detail
        if not target.is_tls and not self.allow_private:
            return "the scheme must be https"
        return self.forbids_target(target)

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
    numbers: list[int] = []
    if any(ip in network for network in _LOW_32_BITS):
        numbers.append(number)
    if ip in _LOCAL_NAT64:
        numbers.extend(_translated_addresses(number))
    if ip in _SIX_TO_FOUR:
        numbers.append(number >> 80)
    if ip in _TEREDO:
        # The server as it is, and the client with all bits inverted.
        numbers.extend((number >> 64, ~number))
    if (number >> 32) & 0xFFFFFFFF in _ISATAP:
        numbers.append(number)
    return tuple(IPv4Address(number & 0xFFFFFFFF) for number in numbers)


def _translated_addresses(number: int) -> tuple[int, ...]:
    """The number at each of the places that RFC 6052 has for an IPv4 address (prefixes of 32, 40,
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

    A network may translate under a prefix of its own, which is not known here. A metadata service
    is one address among four billion, so no honest address is lost by looking for it under any
    prefix.
    """
    if ip in _METADATA:
        return "a metadata service"
    if ip.is_multicast:
        return "a multicast address"
    if isinstance(ip, IPv4Address):
        return None
    contained = embedded_addresses(ip)
    if any(
        _is_metadata(number) for number in (*map(int, contained), *_translated_addresses(int(ip)))
    ):
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
