"""One request and its response: parses the head, decodes the body and speaks ASGI (RFC 9112).

The parser refuses every head that two parsers could read differently, because a proxy in front of
this server may read it in the other way. These are: both framing headers together, a framing header
twice, folded lines, bare line feeds, spaces before a colon, unknown versions, and targets that name
another host.

Both body decoders remove their bytes from the start of a buffer and leave the rest, which belongs
to the next request. They do no input or output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import trio

from conveyor.domain.errors import Refused

# Bounds the CPU time of one head.
HEADERS_MAX = 100


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Sizes of a head. Larger values let each connection hold more memory before it is refused.

    The longest part of a head that Conveyor itself makes is a token of a few hundred bytes, and a
    cursor has at most 512 characters. 32 KiB leave room for cookies and for tracing headers that
    proxies add.
    """

    head_bytes_max: int = 32 * 1024
    target_bytes_max: int = 8 * 1024


USUAL_HEADS = HeadLimits()

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


def check_unfinished(received: bytes | bytearray, sizes: HeadLimits = USUAL_HEADS) -> None:
    """Refuses an incomplete head as soon as no further bytes can make it valid."""
    if received.count(b"\n") != received.count(b"\r\n"):
        raise MalformedRequest("Lines must end with CR LF.")
    if len(received) > sizes.head_bytes_max:
        if b"\r\n" not in received:
            raise _target_too_long(sizes)
        raise _headers_too_large(sizes)


def parse_head(head: bytes, sizes: HeadLimits = USUAL_HEADS) -> Head:
    """Parses a head without the empty line at its end. Raises a subclass of Refused."""
    if len(head) > sizes.head_bytes_max:
        raise _headers_too_large(sizes)
    request_line, *lines = head.split(b"\r\n")
    method, target, minor_version = _parse_request_line(request_line, sizes)
    headers = _parse_headers(lines)
    by_name: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _UNIQUE and name in by_name:
            raise MalformedRequest(f"Send one {name.decode().title()} header.")
        by_name[name] = value
    if minor_version == 1 and b"host" not in by_name:
        raise MalformedRequest("The Host header is missing.")
    path, _, query = target.partition(b"?")
    return Head(
        method=method,
        path=path,
        query=query,
        minor_version=minor_version,
        headers=headers,
        length_bytes=_find_length(by_name, minor_version),
        expects_continue=minor_version == 1 and by_name.get(b"expect", b"").lower() == _EXPECTED,
        # The server never upgrades. The connection of a client that asks for it is closed, because
        # the client may send another protocol next.
        wants_close=minor_version == 0 or b"upgrade" in by_name or _has_close(headers),
    )


_UNIQUE = frozenset({b"host", b"content-length", b"transfer-encoding"})
_EXPECTED = b"100-continue"


def _parse_request_line(line: bytes, sizes: HeadLimits) -> tuple[str, bytes, int]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise MalformedRequest("The request line is not one of HTTP/1.1.")
    method, target, minor_version = match.groups()
    if len(target) > sizes.target_bytes_max:
        raise _target_too_long(sizes)
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


def _find_length(by_name: dict[bytes, bytes], minor_version: int) -> int | None:
    coding, length = by_name.get(b"transfer-encoding"), by_name.get(b"content-length")
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


def _headers_too_large(sizes: HeadLimits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The head may have at most {sizes.head_bytes_max} bytes.")


def _target_too_long(sizes: HeadLimits) -> TargetTooLong:
    return TargetTooLong(f"The target may have at most {sizes.target_bytes_max} bytes.")


# Chunk extensions are ignored. A short one is skipped. Many of them are an attack, because they
# cost CPU time without any body, so their total is bounded.
_SIZE_LINE_BYTES_MAX = 128
_EXTENSION_BYTES_MAX = 4 * 1024

# The size of a chunk: up to 8 hexadecimal digits, then an optional extension without control
# characters. More digits would exceed every limit on bodies.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(;[\t\x20-\x7e]*)?")


class Decoder(Protocol):
    @property
    def is_complete(self) -> bool: ...

    def take(self, buffer: bytearray) -> bytes:
        """Removes body bytes and their framing from the start of `buffer`; returns the body."""
        ...


class SizedBody:
    """A body with a Content-Length, or an empty body."""

    def __init__(self, length_bytes: int) -> None:
        self._left = length_bytes

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def take(self, buffer: bytearray) -> bytes:
        data = bytes(buffer[: self._left])
        del buffer[: len(data)]
        self._left -= len(data)
        return data


class ChunkedBody:
    """A chunked body. `_left` counts the rest of a chunk including its CR LF."""

    def __init__(self) -> None:
        self._left = 0
        self._extension_bytes = 0
        self._is_last = False
        self.is_complete = False

    def take(self, buffer: bytearray) -> bytes:
        pieces = []
        position = 0
        while not self.is_complete:
            if self._left == 0:
                following = self._read_size(buffer, position)
                if following is None:
                    break
                position = following
                continue
            if self._left > 2:
                data = bytes(buffer[position : position + self._left - 2])
                pieces.append(data)
                position += len(data)
                self._left -= len(data)
            if self._left > 2 or not self._skip_end(buffer, position):
                break
            position += 2
        del buffer[:position]
        return b"".join(pieces)

    def _read_size(self, buffer: bytearray, position: int) -> int | None:
        """Returns the position of the chunk's data, or None if its size line is incomplete."""
        end = buffer.find(b"\r\n", position, position + _SIZE_LINE_BYTES_MAX)
        if end < 0:
            line = buffer[position : position + _SIZE_LINE_BYTES_MAX]
            if len(line) == _SIZE_LINE_BYTES_MAX or b"\n" in line:
                raise MalformedRequest("The size of a chunk is malformed.")
            return None
        match = _SIZE.fullmatch(buffer, position, end)
        if match is None:
            raise MalformedRequest("The size of a chunk is malformed.")
        self._extension_bytes += len(match.group(2) or b"")
        if self._extension_bytes > _EXTENSION_BYTES_MAX:
            raise MalformedRequest("There are too many chunk extensions.")
        size_bytes = int(match.group(1), 16)
        self._is_last = size_bytes == 0
        self._left = size_bytes + 2
        return end + 2

    def _skip_end(self, buffer: bytearray, position: int) -> bool:
        """Whether the CR LF after a chunk has arrived.

        Trailers would come in its place after the last chunk. They are refused like any other
        bytes, because the server does not use them.
        """
        end = bytes(buffer[position : position + 2])
        if not b"\r\n".startswith(end):
            raise MalformedRequest("A chunk does not end where its size says, or has trailers.")
        if len(end) < 2:
            return False
        self._left = 0
        self.is_complete = self._is_last
        return True


def decoder_for(head: Head) -> Decoder:
    return ChunkedBody() if head.length_bytes is None else SizedBody(head.length_bytes)


# An exchange is one request and its response, as the events of an ASGI application
# (docs/api.md, Conventions).
#
# The server reads the body no faster than the application consumes it. Quart, between the two,
# buffers every piece that it receives, so the server stops reading while more than
# `UNTAKEN_BYTES_MAX` are not consumed. After the response has begun, the application no longer
# needs the body, and the server discards the bytes that still arrive.


# The most bytes of one read.
READ_BYTES = 64 * 1024
# The memory of one request body. A smaller value makes uploads wait for the application more often.
UNTAKEN_BYTES_MAX = 1024 * 1024
# A response that is ready before the whole request has arrived waits this long for the rest,
# because the connection can then be reused. The server waits as long before it sends 100 Continue,
# because the application may refuse the request without its body.
WAIT_TIMEOUT_S = 0.1
# If a longer body was refused, the server closes the connection, whether the whole body arrived or
# not: the client may still be sending, and may read the response only afterwards.
REFUSED_BODY_BYTES_MAX = 64 * 1024
# A client must receive a piece of the response within this time, plus a second per 16 KiB of it.
# Smaller values cut off slow clients; larger ones let a client that does not read hold memory.
WRITE_S = 30.0
WRITE_BYTES_PER_S_MIN = 16 * 1024

# The key of the ASGI scope for the function that the application calls after it consumed body
# bytes.
BODY_TAKEN = "conveyor.body_taken"

Event = dict[str, Any]

_DISCONNECT: Event = {"type": "http.disconnect"}
_BODILESS = frozenset({204, 304})
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_CONTINUE_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange:
    """One request over `stream`. `buffer` holds the bytes that were read after its head."""

    def __init__(
        self,
        stream: trio.SocketStream,
        head: Head,
        buffer: bytearray,
        *,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._head = head
        self._buffer = buffer
        self._decoder = decoder_for(head)
        self._is_stopping = is_stopping
        self._body_arrived = trio.Event()
        self._is_body_told = False
        self._expects_continue = head.expects_continue
        self._untaken_bytes = 0
        self._room = trio.Event()
        self._answering = trio.Event()
        self._start: Event | None = None
        self._left: int | None = None
        self._is_chunked = False
        self.scope = trio.CancelScope()
        self.has_begun = False
        self.is_complete = False
        self.is_client_gone = False
        self.keeps_alive = False
        self.refusal: Refused | None = None

    def make_scope(self, client: tuple[str, int], server: tuple[str, int]) -> Event:
        scope = make_scope(self._head, client, server)
        scope[BODY_TAKEN] = self._take
        return scope

    async def receive(self) -> Event:
        if self.is_client_gone or self.refusal is not None:
            return _DISCONNECT
        if self._is_body_told:
            await self._wait_disconnect()
            return _DISCONNECT
        while self._untaken_bytes > UNTAKEN_BYTES_MAX and not self._answering.is_set():
            await self._room.wait()
        try:
            data = await self._read_body()
        except MalformedRequest as refusal:
            self.refusal = refusal
            return _DISCONNECT
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.is_client_gone = True
            return _DISCONNECT
        self._untaken_bytes += len(data)
        self._is_body_told = self._decoder.is_complete
        return {"type": "http.request", "body": data, "more_body": not self._is_body_told}

    def _take(self, size_bytes: int) -> None:
        self._untaken_bytes -= size_bytes
        self._wake_reader()

    def _wake_reader(self) -> None:
        self._room.set()
        self._room = trio.Event()

    async def _read_body(self) -> bytes:
        while True:
            data = self._decoder.take(self._buffer)
            if self._decoder.is_complete:
                self._body_arrived.set()
                return data
            # After the response has begun, the data is discarded and the loop reads on, so that the
            # connection can be reused.
            if data and not self._answering.is_set():
                return data
            if self._expects_continue:
                await self._permit_body()
            piece = await self._stream.receive_some(READ_BYTES)
            if not piece:
                raise MalformedRequest("The body ended before it was whole.")
            self._buffer += piece

    async def _permit_body(self) -> None:
        """Sends 100 Continue, unless the application responds first and needs no body."""
        self._expects_continue = False
        with trio.move_on_after(WAIT_TIMEOUT_S):
            await self._answering.wait()
            return
        await self._write(_CONTINUE_RESPONSE)

    async def _wait_disconnect(self) -> None:
        try:
            piece = await self._stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            piece = b""
        if piece:
            # The client pipelined its next request. It stays in the buffer until this response is
            # complete. From here on, a disconnect is not detected.
            self._buffer += piece
            await trio.sleep_forever()
        self.is_client_gone = True

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self._start = event
            self._answering.set()
            self._wake_reader()
            await self._wait_rest_of_body()
            if not _has_length(event["headers"]):
                # A stream may have no data for a while. Send its head now.
                await self._write(self._encode_start())
            return
        assert event["type"] == "http.response.body"
        data = b"" if self.has_begun else self._encode_start()
        is_last = not event.get("more_body", False)
        data += self._encode_body(bytes(event.get("body", b"")), is_last=is_last)
        if data:
            await self._write(data)
        if is_last:
            # A response shorter than its Content-Length must not look complete, so the connection
            # is aborted.
            self.is_complete = not self._left
            self.keeps_alive = self.keeps_alive and self.is_complete

    async def _wait_rest_of_body(self) -> None:
        if not self._decoder.is_complete:
            with trio.move_on_after(WAIT_TIMEOUT_S):
                await self._body_arrived.wait()

    def _encode_start(self) -> bytes:
        assert self._start is not None
        self.has_begun = True
        status, headers = int(self._start["status"]), list(self._start["headers"])
        is_bodiless = self._head.method == "HEAD" or status in _BODILESS
        if status in _BODILESS:
            headers = [pair for pair in headers if pair[0].lower() != b"content-length"]
        self._left = 0 if is_bodiless else _response_length(headers)
        # HTTP/1.0 has no chunks: the end of the connection is the end of the body.
        is_open_ended = self._left is None and self._head.minor_version == 0
        if self._left is None and not is_open_ended:
            self._is_chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        self.keeps_alive = (
            self._decoder.is_complete
            and not (status >= 400 and self._is_body_long())
            and not self._head.wants_close
            and not is_open_ended
            and not self._is_stopping()
        )
        if not self.keeps_alive:
            headers.append((b"connection", b"close"))
        return encode_head(status, headers)

    def _is_body_long(self) -> bool:
        length_bytes = self._head.length_bytes
        return length_bytes is None or length_bytes > REFUSED_BODY_BYTES_MAX

    def _encode_body(self, data: bytes, *, is_last: bool) -> bytes:
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            return chunk + b"0\r\n\r\n" if is_last else chunk
        if self._left is None:
            return data
        data = data[: self._left]
        self._left -= len(data)
        return data

    async def _write(self, data: bytes) -> None:
        """Sends bytes. If the client has gone or does not read, the application is cancelled."""
        with trio.move_on_after(WRITE_S + len(data) / WRITE_BYTES_PER_S_MIN) as scope:
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                scope.cancel()
                await trio.lowlevel.checkpoint()
        if scope.cancelled_caught:
            self.is_client_gone = True
            self.scope.cancel(reason="the client does not take the response")
            await trio.lowlevel.checkpoint()


def make_scope(head: Head, client: tuple[str, int], server: tuple[str, int]) -> Event:
    return {
        "type": "http",
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "http_version": f"1.{head.minor_version}",
        "method": head.method,
        "scheme": "http",
        "path": unquote(head.path.decode("ascii")),
        "raw_path": head.path,
        "query_string": head.query,
        "root_path": "",
        "headers": list(head.headers),
        "client": client,
        "server": server,
        "state": {},
        "extensions": {},
    }


def encode_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b""))]
    for name, value in headers:
        assert b"\n" not in value, "a header value with a line feed splits the response"
        assert b"\r" not in value, "a header value with a carriage return splits the response"
        lines.append(b"%b: %b" % (name.lower(), value))
    lines.append(b"date: " + formatdate(usegmt=True).encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _has_length(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return _response_length(headers) is not None


def _response_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    lengths: Mapping[bytes, bytes] = {name.lower(): value for name, value in headers}
    length = lengths.get(b"content-length")
    return None if length is None else int(length)
