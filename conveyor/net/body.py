"""Collects one response body under its cap, decoded, and without copies where one piece is all."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.net.decoding import Decoder, decoder_for
from conveyor.net.errors import BadEncoding, BodyTooLarge

EXCERPT_BYTES = 64 * 1024
# An honest encoding of incompressible data is a little larger than the data.
_ENCODED_SLACK_BYTES = 64 * 1024


class WholeBody:
    """Every byte or an error: BodyTooLarge, BadEncoding."""

    __slots__ = ("_bytes_max", "_decoder", "_encoded_bytes", "_first", "_rest", "size")

    def __init__(self, encodings: list[bytes], bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._decoder: Decoder | None = decoder_for(encodings, bytes_max)
        self._encoded_bytes = 0
        self._first = b""
        self._rest = bytearray()
        self.size = 0

    def expect(self, encoded_bytes: int | None) -> None:
        """Refuse an announced length before a byte of it is read."""
        if encoded_bytes is not None and encoded_bytes > self._encoded_bytes_max:
            raise self._too_large()

    def add(self, data: bytes) -> Iterator[None]:
        """Take encoded bytes; yields after each decoded piece, so that the caller may wait."""
        self._encoded_bytes += len(data)
        self.expect(self._encoded_bytes)
        if self._decoder is None:
            self._keep(data)
            yield
            return
        for piece in self._decoder.decode(data):
            self._keep(piece)
            yield

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

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._bytes_max} bytes")


def excerpt(encodings: list[bytes], encoded: bytes) -> bytes:
    """The first 64 KiB of an answer that is only looked at; empty if it cannot be decoded."""
    try:
        decoder = decoder_for(encodings, EXCERPT_BYTES)
        if decoder is None:
            return encoded[:EXCERPT_BYTES]
        kept = bytearray()
        for piece in decoder.decode(encoded):
            kept += piece
    except (BadEncoding, BodyTooLarge):
        return b""
    return bytes(kept)
