"""Collects one response body under its cap, decoded, and without copies where one piece is all."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from conveyor.net.decoding import Decoder, decoder_for
from conveyor.net.errors import BadEncoding, BodyTooLarge

EXCERPT_BYTES = 64 * 1024
_EXCERPT_ENCODED_BYTES = 16 * 1024
# An honest encoding of incompressible data is a little larger than the data.
_ENCODED_SLACK_BYTES = 64 * 1024
# What is decoded at once: a few milliseconds, whatever the encoding.
STEP_DECODED_BYTES = 1024 * 1024
STEP_PIECES = 64


class WholeBody:
    """Every byte or an error: BodyTooLarge, BadEncoding.

    What was added is decoded in steps, each of which may run in another thread: nothing else is
    touched. `encoded_bytes` and `size` are what has arrived and what became of it.
    """

    __slots__ = (
        "_bytes_max",
        "_decoder",
        "_first",
        "_pieces",
        "_rest",
        "encoded_bytes",
        "size",
    )

    def __init__(self, encodings: list[bytes], bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._decoder: Decoder | None = decoder_for(encodings, bytes_max)
        self._pieces: Iterator[bytes] = iter(())
        self._first = b""
        self._rest = bytearray()
        self.encoded_bytes = 0
        self.size = 0

    def expect(self, encoded_bytes: int | None) -> None:
        """Refuse an announced length before a byte of it is read."""
        if encoded_bytes is not None and encoded_bytes > self._encoded_bytes_max:
            raise too_large(self._bytes_max)

    def add(self, data: bytes) -> bool:
        """Take bytes as they came; whether `decode_step` is to be called for them."""
        self.encoded_bytes += len(data)
        self.expect(self.encoded_bytes)
        if self._decoder is None:
            self._keep(data)
            return False
        self._pieces = self._decoder.decode(data)
        return True

    def decode_step(self, cpu_s_max: float = inf) -> bool:
        """Decode some of what was added, for so long at most; whether there is more of it."""
        assert self._decoder is not None
        size_max, cpu_s_max = self.size + STEP_DECODED_BYTES, self._decoder.cpu_s + cpu_s_max
        for _ in range(STEP_PIECES):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._keep(piece)
            if self.size >= size_max or self._decoder.cpu_s >= cpu_s_max:
                break
        return True

    def finish(self) -> bytes:
        if self._decoder is not None:
            self._decoder.finish()
        return bytes(self._rest) if self._rest else self._first

    @property
    def _encoded_bytes_max(self) -> int:
        return self._bytes_max + (_ENCODED_SLACK_BYTES if self._decoder else 0)

    def _keep(self, piece: bytes) -> None:
        if not self.size:
            self._first = piece
        else:
            if not self._rest:
                self._rest += self._first
                self._first = b""
            self._rest += piece
        self.size += len(piece)


def too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {bytes_max} bytes")


def excerpt(encodings: list[bytes], encoded: bytes) -> bytes:
    """The first 64 KiB of an answer that is only looked at; empty if it cannot be decoded."""
    try:
        decoder = decoder_for(encodings, EXCERPT_BYTES)
        if decoder is None:
            return encoded[:EXCERPT_BYTES]
        kept = bytearray()
        # Here and now, so little of it: 64 KiB may be much work, and few read them.
        for piece in decoder.decode(encoded[:_EXCERPT_ENCODED_BYTES]):
            kept += piece
    except (BadEncoding, BodyTooLarge):
        return b""
    return bytes(kept)
