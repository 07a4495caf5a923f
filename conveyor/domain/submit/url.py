"""The one strict URL parser: at submit, at every redirect and at connect
(docs/engines.md, Targets).

What was checked is what is connected to: no second parser ever sees the text. Userinfo, control
characters, spaces, backslashes and hosts that only look numeric are refused, never repaired.
Non-ASCII hosts go through strict IDNA 2008 without compatibility mapping, so that full-width
digits and ideographic dots end here and not on loopback.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum
from ipaddress import AddressValueError, IPv4Address, IPv6Address

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
        absolute = origin + _without_dots(reference)
    elif not reference:
        absolute = origin + base.path_and_query
    else:
        path = base.path_and_query.partition("?")[0]
        folder = path if reference.startswith("?") else path.rpartition("/")[0] + "/"
        absolute = origin + _without_dots(folder + reference)
    return parse_url(absolute, chars_max=LOCATION_CHARS_MAX)


def _parse_carefully(text: str) -> Target | BadUrl:
    if _FORBIDDEN.search(text):
        return _malformed("a space, control character, backslash or escaped line break")
    found = _SCHEME.match(text)
    if found is None:
        return _malformed("no scheme")
    scheme = found[1].lower()
    if scheme not in _DEFAULT_PORTS:
        return BadUrl(UrlReason.UNSUPPORTED_SCHEME, "only http and https URLs are fetched")
    rest = text[found.end() :]
    if not rest.startswith("//"):
        return BadUrl(UrlReason.MISSING_HOST, "no host after the scheme")
    authority, tail = _cut_authority(rest[2:])
    return _with_authority(scheme, authority, _escape(tail))


def _with_authority(scheme: str, authority: str, tail: str) -> Target | BadUrl:
    if "@" in authority:
        return _malformed("user names and passwords are not taken in URLs")
    host_text, colon, port_text = _cut_port(authority)
    if not host_text:
        return BadUrl(UrlReason.MISSING_HOST, "no host in the URL")
    host = _host_from(host_text)
    if host is None:
        return _malformed("the host is not a valid name or a canonical address")
    port = _DEFAULT_PORTS[scheme]
    if colon:
        if not _PORT.match(port_text) or int(port_text) > 65535:
            return _malformed("the port is not a number from 1 to 65535")
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


def _percent_encoded(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def _without_dots(reference: str) -> str:
    """RFC 3986 5.2.4 on the path; the query is left alone."""
    path, mark, query = reference.partition("?")
    if "/." not in path:
        return reference
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in {".", ".."}:
        kept.append("")
    return "/" + "/".join(kept) + mark + query


def _malformed(detail: str) -> BadUrl:
    return BadUrl(UrlReason.MALFORMED_URL, detail)
