"""Requests and responses as values, and how a request becomes bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from conveyor.domain import limits
from conveyor.domain.submit.url import Target
from conveyor.http_client.errors import BadRequest

Headers = Sequence[tuple[str, str]]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*\Z")
_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade"})


def wants_every_body(_status: int) -> bool:
    return True


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. A body is returned whole when `wants_body(status)`, and is then capped at
    `body_bytes_max`, decoded; of any other answer only the first 64 KiB are read. Timeouts that
    are None are the pool's. `partition` names the caller that the request is made for: no
    connection and no TLS session is shared between two of them.
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
        # Queries and headers carry secrets, and a repr ends up in logs.
        return f"Request({self.method} {self.target.scheme}://{self.target.authority})"


class Upload(msgspec.Struct, frozen=True):
    """A body of known length that comes in pieces; it can be sent once only."""

    pieces: AsyncIterator[bytes]
    size_bytes: int


class Response(msgspec.Struct, frozen=True):
    """An answer; header names are lower-case. `is_whole` is False for a shortened body."""

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
    """The whole request in one piece: one send, one packet where it fits. A body that is not
    part of it, but follows, has `upload_bytes`.
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
