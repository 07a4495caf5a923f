"""Requests and responses as values, and the encoding of a request."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from conveyor.domain import limits
from conveyor.domain.submit.target import Target
from conveyor.http_client.errors import BadRequest

Headers = Sequence[tuple[str, str]]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
# A header name is a `token` of RFC 9110, 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
# A header value has no control character but the tab: CR or LF would start another header. It has
# no surrogate, which cannot be encoded. \Z and not $: $ would accept a line feed at the end.
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*\Z")
# The client writes these itself. A caller that sets them could change where a request ends.
_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade"})


def wants_every_body(_status: int) -> bool:
    return True


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    If `wants_body(status)`, the response has the whole decoded body, of at most `body_bytes_max`
    bytes. Of any other response only the first 64 KiB are read. A timeout of None means the
    timeout of the pool. `partition` names the caller: two partitions share no connection and no
    TLS session.
    """

    method: str
    target: Target
    partition: str = ""
    headers: Headers = ()
    body: bytes | None = None
    deadline_s: float = limits.SCRAPE_DEADLINE_S
    body_bytes_max: int = limits.BODY_BYTES_MAX
    wants_body: Callable[[int], bool] = wants_every_body
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None

    @property
    def is_idempotent(self) -> bool:
        return self.method in {"GET", "HEAD"}

    def __repr__(self) -> str:
        # Queries and headers contain secrets, and logs contain reprs.
        return f"Request({self.method} {self.target.scheme}://{self.target.authority})"


class Upload(msgspec.Struct, frozen=True):
    """A body of known length in pieces. It can be sent only once."""

    pieces: AsyncIterator[bytes]
    size_bytes: int


class Response(msgspec.Struct, frozen=True):
    """A response. Header names are in lower case. `is_whole` is False if the body was cut."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    is_whole: bool = True

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return _text_from(value)
        return None


def encode_request(request: Request, upload_bytes: int | None = None) -> bytes:
    """Encodes head and body in one piece, so that one send, and if it fits one packet, is enough.

    `upload_bytes` is the length of a body that the caller sends afterwards. Raises BadRequest.
    """
    if request.method not in _METHODS:
        raise BadRequest("the method is not supported")
    target = request.target
    lines = [f"{request.method} {target.path_and_query} HTTP/1.1\r\nHost: {target.authority}\r\n"]
    for name, value in request.headers:
        if not is_header(name, value) or name.lower() in _FRAMING:
            raise BadRequest("a request header is not allowed")
        lines.append(f"{name}: {value}\r\n")
    body = request.body
    if upload_bytes is not None:
        lines.append(f"Content-Length: {upload_bytes}\r\n")
    elif body is not None or request.method not in _BODYLESS:
        lines.append(f"Content-Length: {len(body or b'')}\r\n")
    lines.append("\r\n")
    head = "".join(lines).encode()
    return head + body if body else head


def is_header(name: str, value: str) -> bool:
    return _TOKEN.match(name) is not None and _VALUE.match(value) is not None


def _text_from(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
