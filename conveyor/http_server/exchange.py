"""The body of a request: where it ends, by its length or by its chunks (RFC 9112, 6 and 7).

Both decoders take what they can from the start of a buffer and leave the rest, which belongs to the
next request. Neither waits for anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import trio

from conveyor.domain.errors import Refused
from conveyor.http_server.head import Head, MalformedRequest

# Extensions mean nothing to us; a line of them is skipped, a stream of them is an attack.
_SIZE_LINE_BYTES_MAX = 128
_EXTENSION_BYTES_MAX = 4 * 1024

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(;[\t\x20-\x7e]*)?")


class Decoder(Protocol):
    @property
    def is_complete(self) -> bool: ...

    def take(self, buffer: bytearray) -> bytes:
        """The body's bytes at the start of `buffer`, which loses them and their framing."""
        ...


class SizedBody:
    """A body whose length was announced, 0 included."""

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
    """A body in chunks. `_left` counts the bytes of a chunk with the CR LF behind it."""

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
        """Where the chunk's data begins; None while its size line is not whole."""
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
        """Whether the CR LF behind a chunk is there. Behind the last chunk, trailers would stand in
        its place: nothing reads them, so they are refused with everything else."""
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


# An exchange: one request and its response, as the events of an ASGI application
# (docs/api.md, Conventions).
#
# The body is read no faster than the application takes it: the framework in between holds whatever
# it is given, so reading waits while more than `UNTAKEN_BYTES_MAX` lie there. Once the response has
# begun, the rest of the body is of no use: what still arrives is discarded.


READ_BYTES = 64 * 1024
UNTAKEN_BYTES_MAX = 1024 * 1024
# A response that is ready before its request has arrived waits so long for the rest, because the
# connection can then be used again; a client that asked for permission to send waits as long.
WAIT_TIMEOUT_S = 0.1
# A connection over which a longer body was refused is closed, whether all of it arrived or not: the
# client may still be sending, and would not look for the response before it is done.
REFUSED_BODY_BYTES_MAX = 64 * 1024
# A client must take a piece of the response within this time, plus a second per 16 KiB of it.
WRITE_S = 30.0
WRITE_BYTES_PER_S_MIN = 16 * 1024

# Under this name the application finds the function to call when it has taken bytes of the body.
BODY_TAKEN = "conveyor.body_taken"

Event = dict[str, Any]

_DISCONNECT: Event = {"type": "http.disconnect"}
_BODILESS = frozenset({204, 304})
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange:
    """One request over `stream`; `buffer` holds what was read beyond its head."""

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
            if data and not self._answering.is_set():
                return data
            if self._expects_continue:
                await self._permit_body()
            piece = await self._stream.receive_some(READ_BYTES)
            if not piece:
                raise MalformedRequest("The body ended before it was whole.")
            self._buffer += piece

    async def _permit_body(self) -> None:
        """Sends 100 Continue, unless the response comes without the body."""
        self._expects_continue = False
        with trio.move_on_after(WAIT_TIMEOUT_S):
            await self._answering.wait()
            return
        await self._write(_CONTINUE)

    async def _wait_disconnect(self) -> None:
        try:
            piece = await self._stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            piece = b""
        if piece:
            # The next request already: it waits for its turn, and we no longer see a disconnect.
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
                # A stream may have nothing to say for a while: its head does not wait for that.
                await self._write(self._encode_start())
            return
        assert event["type"] == "http.response.body"
        data = b"" if self.has_begun else self._encode_start()
        is_last = not event.get("more_body", False)
        data += self._encode_body(bytes(event.get("body", b"")), is_last=is_last)
        if data:
            await self._write(data)
        if is_last:
            # A response shorter than announced must not look whole: the connection is aborted.
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
        self._left = 0 if is_bodiless else _find_length(headers)
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
        """A client that is gone, or does not read, ends the application's work for it."""
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
    return _find_length(headers) is not None


def _find_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    lengths: Mapping[bytes, bytes] = {name.lower(): value for name, value in headers}
    length = lengths.get(b"content-length")
    return None if length is None else int(length)
