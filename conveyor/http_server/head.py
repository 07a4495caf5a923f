"""Parses the head of a request, request line and headers, strictly
(docs/api.md, Conventions, RFC 9112).

The parser refuses every head that two parsers could read differently, because a proxy in front of
this server may read it in the other way. These are: both framing headers together, a framing header
twice, folded lines, bare line feeds, spaces before a colon, unknown versions, and targets that name
another host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from conveyor.domain.errors import Refused

# The longest part of a head that Conveyor itself makes is a token of a few hundred bytes. 32 KiB
# leave room for cookies and for tracing headers that proxies add. A larger value lets each
# connection hold more memory before it is refused.
HEAD_BYTES_MAX = 32 * 1024
# Bounds the CPU time of one head.
HEADERS_MAX = 100
# Cursors have at most 512 characters, and tokens of links fewer.
TARGET_BYTES_MAX = 8 * 1024

END = b"\r\n\r\n"

# Method, one space, target of visible ASCII characters, one space, version 1.0 or 1.1.
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]{0,31}) ([\x21-\x7e]+) HTTP/1\.([01])")
# A token (RFC 9110, 5.6.2), the colon directly after it, and a value without control characters
# except the tab. A folded line has no token at its start and does not match.
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
# 18 digits fit into 64 bits. The limit on bodies is far below.
_LENGTH = re.compile(rb"[0-9]{1,18}")


class MalformedRequest(Refused):
    """The bytes are not one well-formed HTTP/1.1 request."""

    code = "malformed_request"
    title = "Malformed request"


class TargetTooLong(Refused):
    status = 414
    code = "uri_too_long"
    title = "URI too long"


class HeadersTooLarge(Refused):
    status = 431
    code = "headers_too_large"
    title = "Headers too large"


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. `length_bytes` is None for a chunked body. Header names are in lower
    case.
    """

    method: str
    path: bytes
    query: bytes
    minor_version: int
    headers: tuple[tuple[bytes, bytes], ...]
    length_bytes: int | None
    expects_continue: bool
    wants_close: bool


def check_unfinished(received: bytes | bytearray) -> None:
    """Refuses an incomplete head as soon as no further bytes can make it valid."""
    if received.count(b"\n") != received.count(b"\r\n"):
        raise MalformedRequest("Lines must end with CR LF.")
    if len(received) > HEAD_BYTES_MAX:
        if b"\r\n" not in received:
            raise TargetTooLong(f"The target may have at most {TARGET_BYTES_MAX} bytes.")
        raise _headers_too_large()


def parse_head(head: bytes) -> Head:
    """Parses a head without the empty line at its end. Raises a subclass of Refused."""
    if len(head) > HEAD_BYTES_MAX:
        raise _headers_too_large()
    request_line, *lines = head.split(b"\r\n")
    method, target, minor_version = _parse_request_line(request_line)
    headers = _parse_headers(lines)
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _UNIQUE and name in found:
            raise MalformedRequest(f"Send one {name.decode().title()} header.")
        found[name] = value
    if minor_version == 1 and b"host" not in found:
        raise MalformedRequest("The Host header is missing.")
    path, _, query = target.partition(b"?")
    return Head(
        method=method,
        path=path,
        query=query,
        minor_version=minor_version,
        headers=headers,
        length_bytes=_find_length(found, minor_version),
        expects_continue=minor_version == 1 and found.get(b"expect", b"").lower() == _CONTINUE,
        # The server never upgrades. The connection of a client that asks for it is closed, because
        # the client may send another protocol next.
        wants_close=minor_version == 0 or b"upgrade" in found or _has_close(headers),
    )


_UNIQUE = frozenset({b"host", b"content-length", b"transfer-encoding"})
_CONTINUE = b"100-continue"


def _parse_request_line(line: bytes) -> tuple[str, bytes, int]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise MalformedRequest("The request line is not one of HTTP/1.1.")
    method, target, minor_version = match.groups()
    if len(target) > TARGET_BYTES_MAX:
        raise TargetTooLong(f"The target may have at most {TARGET_BYTES_MAX} bytes.")
    # Absolute and authority forms are for proxies. They name a second host besides the Host header.
    if not target.startswith(b"/") or b"#" in target:
        raise MalformedRequest("The target must be a path that begins with a slash.")
    return method.decode("ascii"), target, int(minor_version)


def _parse_headers(lines: list[bytes]) -> tuple[tuple[bytes, bytes], ...]:
    if len(lines) > HEADERS_MAX:
        raise HeadersTooLarge(f"A request may have at most {HEADERS_MAX} headers.")
    headers = []
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise MalformedRequest("A header line is malformed.")
        name, value = match.groups()
        headers.append((name.lower(), value.rstrip(b" \t")))
    return tuple(headers)


def _find_length(found: dict[bytes, bytes], minor_version: int) -> int | None:
    coding, length = found.get(b"transfer-encoding"), found.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise MalformedRequest("Content-Length and Transfer-Encoding exclude each other.")
        if minor_version == 0 or coding.lower() != b"chunked":
            raise MalformedRequest("The only Transfer-Encoding is chunked, in HTTP/1.1.")
        return None
    if length is None:
        return 0
    if _LENGTH.fullmatch(length) is None:
        raise MalformedRequest("Content-Length must be a number of bytes.")
    return int(length)


def _has_close(headers: tuple[tuple[bytes, bytes], ...]) -> bool:
    return any(
        option.strip().lower() == b"close"
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    )


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"The head may have at most {HEAD_BYTES_MAX} bytes.")
