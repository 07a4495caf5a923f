"""Content-Encoding, one layer of it, decoded piece by piece under a cap and a ratio.

Every decoder hands out pieces of a bounded size, so that a bomb is noticed after the first
mebibyte and not after the first gigabyte. After a complete stream, a further gzip member or zstd
frame is decoded as the formats say; other trailing bytes are ignored, as browsers do, except
after brotli, whose library takes none in the same piece and so gets none in the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import brotli
import zstandard

from conveyor.net.errors import BadEncoding, BodyTooLarge

ACCEPT_ENCODING = "gzip, deflate, br, zstd"
RATIO_MAX = 200
RATIO_BYTES_MIN = 1024 * 1024

_PIECE_BYTES = 64 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_SLICE_BYTES = 128
_ZSTD_WINDOW_BYTES_MAX = 8 * 1024 * 1024


class Gzip:
    """Concatenated gzip members, as RFC 1952 has them."""

    __slots__ = ("_head", "_is_over", "_zlib")

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self._head = b""
        self._is_over = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        while data and not self._is_over:
            if self._zlib.eof and not self._next_member(data):
                return
            data, self._head = self._head + data, b""
            yield self._zlib.decompress(data, _PIECE_BYTES)
            data = self._zlib.unconsumed_tail or self._zlib.unused_data

    def is_complete(self) -> bool:
        return self._zlib.eof or self._is_over

    def _next_member(self, data: bytes) -> bool:
        """Start over at a member; hold back a lone first byte of one; stop at anything else."""
        head = self._head + data[:2]
        if not (_GZIP_MAGIC.startswith(head) or head.startswith(_GZIP_MAGIC)):
            self._is_over = True
            return False
        if len(head) < 2:
            self._head = head
            return False
        self._zlib = zlib.decompressobj(wbits=31)
        return True


class Deflate:
    """zlib as the standard says, or raw deflate as some servers understood it."""

    __slots__ = ("_head", "_zlib")

    def __init__(self) -> None:
        self._zlib: zlib._Decompress | None = None
        self._head = b""

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._zlib is None:
            self._head = data = self._head + data
            if len(data) < 2:
                return
            is_zlib = data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._zlib = zlib.decompressobj(wbits=15 if is_zlib else -15)
        while data and not self._zlib.eof:
            yield self._zlib.decompress(data, _PIECE_BYTES)
            data = self._zlib.unconsumed_tail

    def is_complete(self) -> bool:
        return self._zlib is not None and self._zlib.eof


class Brotli:
    __slots__ = ("_brotli",)

    def __init__(self) -> None:
        self._brotli = brotli.Decompressor()

    def decode(self, data: bytes) -> Iterator[bytes]:
        decoder = self._brotli
        if decoder.is_finished():
            raise BadEncoding("there are bytes behind the encoded body")
        yield decoder.process(data, output_buffer_limit=_PIECE_BYTES)
        while not decoder.can_accept_more_data() and not decoder.is_finished():
            yield decoder.process(b"", output_buffer_limit=_PIECE_BYTES)

    def is_complete(self) -> bool:
        return bool(self._brotli.is_finished())


class Zstd:
    """Fed by 128 bytes: the library has no cap on what one call may return, and the most that
    these can hold is 32 blocks of 128 KiB.
    """

    __slots__ = ("_frame", "_head", "_is_over")

    def __init__(self) -> None:
        self._frame = _new_zstd_frame()
        self._head = b""
        self._is_over = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_SLICE_BYTES):
            rest = data[start : start + _ZSTD_SLICE_BYTES]
            while rest and not self._is_over:
                if self._frame.eof and not self._next_frame(rest):
                    break
                rest, self._head = self._head + rest, b""
                yield self._frame.decompress(rest)
                rest = self._frame.unused_data if self._frame.eof else b""

    def is_complete(self) -> bool:
        return self._is_over or self._frame.eof

    def _next_frame(self, data: bytes) -> bool:
        """Start over at a frame; hold back the first bytes of one; stop at anything else."""
        head = self._head + data
        if len(head) < 4:
            self._head = head
            return False
        self._is_over = not _is_zstd_frame(head)
        if not self._is_over:
            self._frame = _new_zstd_frame()
        return not self._is_over


def _new_zstd_frame() -> zstandard.ZstdDecompressionObj:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX).decompressobj()


def _is_zstd_frame(head: bytes) -> bool:
    number = int.from_bytes(head[:4], "little")
    return number == 0xFD2FB528 or number & 0xFFFFFFF0 == 0x184D2A50


_Codec = Gzip | Deflate | Brotli | Zstd
_CODECS: dict[bytes, Callable[[], _Codec]] = {
    b"gzip": Gzip,
    b"x-gzip": Gzip,
    b"deflate": Deflate,
    b"br": Brotli,
    b"zstd": Zstd,
}


class Decoder:
    """One encoded body: counts both sides and refuses what is too large or grows too fast."""

    __slots__ = ("_codec", "_decoded_bytes", "_decoded_bytes_max", "_encoded_bytes")

    def __init__(self, codec: _Codec, decoded_bytes_max: int) -> None:
        self._codec = codec
        self._decoded_bytes_max = decoded_bytes_max
        self._decoded_bytes = 0
        self._encoded_bytes = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        self._encoded_bytes += len(data)
        try:
            for piece in self._codec.decode(data):
                self._decoded_bytes += len(piece)
                self._check()
                yield piece
        except (zlib.error, brotli.error, zstandard.ZstdError) as error:
            raise BadEncoding("the body is not what its Content-Encoding says") from error

    def finish(self) -> None:
        if self._encoded_bytes and not self._codec.is_complete():
            raise BadEncoding("the encoded body ends too early")

    def _check(self) -> None:
        decoded = self._decoded_bytes
        if decoded > self._decoded_bytes_max:
            raise BodyTooLarge(f"the body is larger than {self._decoded_bytes_max} bytes")
        if decoded > RATIO_BYTES_MIN and decoded > RATIO_MAX * self._encoded_bytes:
            raise BodyTooLarge("the body grows more than two hundredfold when decoded")


def decoder_for(values: list[bytes], decoded_bytes_max: int) -> Decoder | None:
    """The decoder for the Content-Encoding headers `values`; None when there is nothing to do."""
    tokens = [token.strip().lower() for value in values for token in value.split(b",")]
    layers = [token for token in tokens if token not in {b"", b"identity"}]
    if not layers:
        return None
    if len(layers) > 1:
        raise BadEncoding("the body is encoded more than once")
    codec = _CODECS.get(layers[0])
    if codec is None:
        raise BadEncoding("the Content-Encoding is not supported")
    return Decoder(codec(), decoded_bytes_max)
