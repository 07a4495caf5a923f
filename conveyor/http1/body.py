"""The body of a request: where it ends, by its length or by its chunks (RFC 9112, 6 and 7).

Both decoders take what they can from the start of a buffer and leave the rest, which belongs to the
next request. Neither waits for anything.
"""

from __future__ import annotations

import re
from typing import Protocol

from conveyor.http1.head import Head, MalformedRequest

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
