"""Decodes one layer of Content-Encoding piece by piece, with limits of size, ratio and CPU time.

Every decoder yields pieces of a bounded size, so that a bomb is detected after the first mebibyte
and not after the first gigabyte. Work without output is bounded as well: empty frames and members,
blocks without data, Huffman tables that decode one byte.

After a complete stream, a further gzip member or zstd frame is decoded, as the formats define.
Other trailing bytes are ignored, as in browsers. Brotli is the exception: its library accepts no
trailing bytes in the same piece, so the decoder accepts none in the next piece either.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from math import inf

try:
    import brotli
    import zstandard
except ModuleNotFoundError:
    # The distribution of the clients alone comes without them: it asks for no encoding.
    brotli = zstandard = None  # type: ignore[assignment]

from conveyor.http_client.errors import BadEncoding, BodyTooLarge

ACCEPT_ENCODING = "gzip, deflate, br, zstd"
# A body that grows by more than this factor is a bomb. The ratio is checked above 1 MiB only: a
# small body of repeated bytes has a high ratio and costs little.
RATIO_MAX = 200
RATIO_BYTES_MIN = 1024 * 1024
# Each frame or member costs a new decoder. Tools that split a stream write frames of 64 KiB and
# more, so one frame per 4 KiB of output, plus FRAMES_MAX, is far above any honest body.
FRAMES_MAX = 256
FRAME_BYTES_MIN = 4 * 1024
# Refuses a body whose encoded form is much larger than its output. Incompressible data grows by
# less than a thousandth when it is encoded. The slack covers bytes that a decoder holds back: a
# block of zstd is 128 KiB.
SHRINKAGE_MAX = 4
SHRINKAGE_SLACK_BYTES = 256 * 1024
# Measured: the slowest honest encoding takes 10 ms of CPU for each mebibyte, input and output
# added. The limit is five times that, plus half a second.
CPU_S_MAX = 0.5
CPU_S_PER_BYTE_MAX = 0.05 / (1024 * 1024)

# About the most output of one step of zlib or brotli. The limits are checked after each piece.
_PIECE_BYTES = 64 * 1024
# The input of one step. In the worst case it makes the decoder build tables for 2 ms without
# output.
_SLICE_BYTES = 8 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
# zlib copies the rest of its input after each member. With slices of this size the cost of many
# small members is not quadratic in the size of the body.
_GZIP_SLICE_BYTES = 4 * 1024
# See Zstd: the size of the input is the only bound on the output of one call.
_ZSTD_SLICE_BYTES = 128
# The output of up to 32 slices is joined, so that the caller does not handle many small pieces.
_ZSTD_SLICES = 32
# A frame can demand a window of this size from the decoder's memory. RFC 8878 recommends 8 MiB.
_ZSTD_WINDOW_BYTES_MAX = 8 * 1024 * 1024


class Gzip:
    """Decodes concatenated gzip members (RFC 1952)."""

    __slots__ = ("_head", "_is_over", "_zlib", "frames_count")

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self._head = b""
        self._is_over = False
        self.frames_count = 1

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self.frames_count == 1:
            yield from self._decode(data)
            return
        for start in range(0, len(data), _GZIP_SLICE_BYTES):
            yield from self._decode(data[start : start + _GZIP_SLICE_BYTES])

    def _decode(self, data: bytes) -> Iterator[bytes]:
        may_hold_more = False
        while (data or may_hold_more) and not self._is_over:
            if self._zlib.eof and not self._next_member(data):
                return
            data, self._head = self._head + data, b""
            piece = self._zlib.decompress(data, _PIECE_BYTES)
            yield piece
            data = self._zlib.unconsumed_tail or self._zlib.unused_data
            may_hold_more = len(piece) == _PIECE_BYTES and not self._zlib.eof

    def is_complete(self) -> bool:
        return self._zlib.eof or self._is_over

    def _next_member(self, data: bytes) -> bool:
        """Starts a new member at the gzip magic, keeps a lone first byte of it, and stops at any
        other byte.
        """
        head = self._head + data[:2]
        if not (_GZIP_MAGIC.startswith(head) or head.startswith(_GZIP_MAGIC)):
            self._is_over = True
            return False
        if len(head) < 2:
            self._head = head
            return False
        self._zlib = zlib.decompressobj(wbits=31)
        self.frames_count += 1
        return True


class Deflate:
    """Decodes zlib, which the standard demands, or raw deflate, which some servers send."""

    __slots__ = ("_head", "_zlib")

    frames_count = 1

    def __init__(self) -> None:
        self._zlib: zlib._Decompress | None = None
        self._head = b""

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._zlib is None:
            self._head = data = self._head + data
            if len(data) < 2:
                return
            # The header of zlib (RFC 1950): method 8, and a checksum that makes it divisible by 31.
            is_zlib = data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._zlib = zlib.decompressobj(wbits=15 if is_zlib else -15)
        may_hold_more = False
        while (data or may_hold_more) and not self._zlib.eof:
            piece = self._zlib.decompress(data, _PIECE_BYTES)
            yield piece
            data = self._zlib.unconsumed_tail
            may_hold_more = len(piece) == _PIECE_BYTES

    def is_complete(self) -> bool:
        return self._zlib is not None and self._zlib.eof


class Brotli:
    __slots__ = ("_brotli",)

    frames_count = 1

    def __init__(self) -> None:
        self._brotli = brotli.Decompressor()

    def decode(self, data: bytes) -> Iterator[bytes]:
        decoder = self._brotli
        if decoder.is_finished():
            raise BadEncoding("there are bytes behind the encoded body")
        piece = decoder.process(data, output_buffer_limit=_PIECE_BYTES)
        yield piece
        # After a full piece the decoder may hold more output, even if it accepts more data.
        while not decoder.is_finished() and (
            len(piece) >= _PIECE_BYTES or not decoder.can_accept_more_data()
        ):
            piece = decoder.process(b"", output_buffer_limit=_PIECE_BYTES)
            yield piece

    def is_complete(self) -> bool:
        return bool(self._brotli.is_finished())


class Zstd:
    """Decodes zstd frames in slices of 128 bytes.

    The library has no limit on the output of one call. A slice of this size contains at most 32
    blocks of 128 KiB.
    """

    __slots__ = ("_frame", "_head", "_is_over", "_zstd", "frames_count")

    def __init__(self) -> None:
        # One decompressor for all frames: its construction costs as much as a small page.
        self._zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
        self._frame = self._zstd.decompressobj()
        self._head = b""
        self._is_over = False
        self.frames_count = 1

    def decode(self, data: bytes) -> Iterator[bytes]:
        pieces: list[bytes] = []
        size_bytes = slices_count = 0
        for start in range(0, len(data), _ZSTD_SLICE_BYTES):
            for piece in self._decode(data[start : start + _ZSTD_SLICE_BYTES]):
                pieces.append(piece)
                size_bytes += len(piece)
            slices_count += 1
            if size_bytes >= _PIECE_BYTES or slices_count == _ZSTD_SLICES:
                yield b"".join(pieces)
                pieces.clear()
                size_bytes = slices_count = 0
        yield b"".join(pieces)

    def _decode(self, rest: bytes) -> Iterator[bytes]:
        while rest and not self._is_over:
            if self._frame.eof and not self._next_frame(rest):
                return
            rest, self._head = self._head + rest, b""
            yield self._frame.decompress(rest)
            rest = self._frame.unused_data if self._frame.eof else b""

    def is_complete(self) -> bool:
        return self._is_over or self._frame.eof

    def _next_frame(self, data: bytes) -> bool:
        """Starts a new frame at a zstd magic number, keeps fewer than 4 bytes of it for the next
        call, and stops at anything else.
        """
        head = self._head + data
        if len(head) < 4:
            self._head = head
            return False
        self._is_over = not _is_zstd_frame(head)
        if not self._is_over:
            self._frame = self._zstd.decompressobj()
            self.frames_count += 1
        return not self._is_over


def _is_zstd_frame(head: bytes) -> bool:
    # The magic numbers of RFC 8878: a frame, or one of the 16 kinds of skippable frame.
    number = int.from_bytes(head[:4], "little")
    return number == 0xFD2FB528 or number & 0xFFFFFFF0 == 0x184D2A50


_Codec = Gzip | Deflate | Brotli | Zstd
_CODECS: dict[bytes, Callable[[], _Codec]] = {
    b"gzip": Gzip,
    b"x-gzip": Gzip,
    b"deflate": Deflate,
}
_CODEC_ERRORS: tuple[type[Exception], ...] = (zlib.error,)
if brotli is not None:
    _CODECS |= {b"br": Brotli, b"zstd": Zstd}
    _CODEC_ERRORS += (brotli.error, zstandard.ZstdError)


class Decoder:
    """Decodes one body under all limits.

    It counts input, output, frames and CPU time, and refuses a body that is too large, grows too
    fast, or needs more work than an honest body of its size.
    """

    __slots__ = (
        "_codec",
        "_cpu_clock",
        "_decoded_bytes",
        "_decoded_bytes_max",
        "_encoded_bytes",
        "_ratio_max",
        "cpu_s",
    )

    def __init__(
        self,
        codec: _Codec,
        decoded_bytes_max: int,
        *,
        ratio_max: float = RATIO_MAX,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._codec = codec
        self._decoded_bytes_max = decoded_bytes_max
        self._ratio_max = ratio_max
        self._cpu_clock = cpu_clock
        self.cpu_s = 0.0
        self._decoded_bytes = 0
        self._encoded_bytes = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yields decoded pieces. Several threads may iterate, but only one at a time."""
        self._encoded_bytes += len(data)
        for start in range(0, len(data), _SLICE_BYTES):
            pieces = self._codec.decode(data[start : start + _SLICE_BYTES])
            while (piece := self._next(pieces)) is not None:
                self._decoded_bytes += len(piece)
                self._check()
                yield piece
        self._check_shrinkage()

    def finish(self) -> None:
        if self._encoded_bytes and not self._codec.is_complete():
            raise BadEncoding("the encoded body ends too early")

    def _next(self, pieces: Iterator[bytes]) -> bytes | None:
        begun_s = self._cpu_clock()
        try:
            return next(pieces, None)
        except _CODEC_ERRORS as error:
            raise BadEncoding("the body is not what its Content-Encoding says") from error
        finally:
            self.cpu_s += self._cpu_clock() - begun_s

    def _check(self) -> None:
        decoded = self._decoded_bytes
        if decoded > self._decoded_bytes_max:
            raise BodyTooLarge(f"the body is larger than {self._decoded_bytes_max} bytes")
        if decoded > RATIO_BYTES_MIN and decoded > self._ratio_max * self._encoded_bytes:
            raise BodyTooLarge("the body grows more than two hundredfold when decoded")
        if self._codec.frames_count > FRAMES_MAX + decoded / FRAME_BYTES_MIN:
            raise BadEncoding("the body is cut into too many frames or members")
        if self.cpu_s > CPU_S_MAX + CPU_S_PER_BYTE_MAX * (decoded + self._encoded_bytes):
            raise BadEncoding("the body takes too much work to decode")

    def _check_shrinkage(self) -> None:
        """Runs after all added input is decoded: `_encoded_bytes` counts all of it from the
        start.
        """
        if self._encoded_bytes > SHRINKAGE_MAX * self._decoded_bytes + SHRINKAGE_SLACK_BYTES:
            raise BadEncoding("the body is far smaller when decoded")


def decoder_for(values: list[bytes], decoded_bytes_max: int) -> Decoder | None:
    """Returns the decoder for the Content-Encoding headers `values`, or None for identity.

    Raises BadEncoding for more than one layer: each layer multiplies the ratio of a bomb.
    """
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


# WholeBody collects one decoded response body up to its limit. A body of one piece is not copied.


# The part of an unwanted body that is read for inspection.
EXCERPT_BYTES = 64 * 1024
# The part of it that the event loop decodes. More of it would block the loop for an unwanted body.
_EXCERPT_ENCODED_BYTES = 16 * 1024
# An honest encoding of incompressible data is slightly larger than the data.
_ENCODED_SLACK_BYTES = 64 * 1024
# The output and the pieces of one step, which takes a few milliseconds with every encoding. Larger
# steps block the thread or the event loop for longer.
STEP_DECODED_BYTES = 256 * 1024
STEP_PIECES = 64


class WholeBody:
    """Collects the whole body, or raises BodyTooLarge or BadEncoding.

    Added bytes are decoded in steps. Each step may run in another thread, because it uses only the
    state of this object. `encoded_bytes` counts the bytes received, `size` the bytes decoded.
    """

    __slots__ = (
        "_buffer",
        "_bytes_max",
        "_decoder",
        "_first",
        "_pieces",
        "encoded_bytes",
        "size",
    )

    def __init__(self, encodings: list[bytes], bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._decoder: Decoder | None = decoder_for(encodings, bytes_max)
        self._pieces: Iterator[bytes] = iter(())
        self._first = b""
        # BytesIO: `getvalue` returns its buffer without a copy, which would be a second body in
        # memory.
        self._buffer: BytesIO | None = None
        self.encoded_bytes = 0
        self.size = 0

    def expect(self, encoded_bytes: int | None) -> None:
        """Raises BodyTooLarge if the encoded body is longer than a body within the limit can be."""
        if encoded_bytes is not None and encoded_bytes > self._encoded_bytes_max:
            raise too_large(self._bytes_max)

    def add(self, data: bytes) -> bool:
        """Adds received bytes. Returns whether the caller must call `decode_step` for them."""
        self.encoded_bytes += len(data)
        self.expect(self.encoded_bytes)
        if self._decoder is None:
            self._keep(data)
            return False
        self._pieces = self._decoder.decode(data)
        return True

    def decode_step(self, cpu_s_max: float = inf) -> bool:
        """Decodes some of the added bytes, for about `cpu_s_max`. Returns whether some are left."""
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
        return self._first if self._buffer is None else self._buffer.getvalue()

    @property
    def _encoded_bytes_max(self) -> int:
        return self._bytes_max + (_ENCODED_SLACK_BYTES if self._decoder else 0)

    def _keep(self, piece: bytes) -> None:
        if not self.size:
            self._first = piece
        else:
            if self._buffer is None:
                self._buffer = BytesIO()
                self._buffer.write(self._first)
                self._first = b""
            self._buffer.write(piece)
        self.size += len(piece)


def too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {bytes_max} bytes")


def excerpt(encodings: list[bytes], encoded: bytes) -> bytes:
    """Returns up to 64 KiB of a body for inspection; empty if it cannot be decoded."""
    try:
        decoder = decoder_for(encodings, EXCERPT_BYTES)
        if decoder is None:
            return encoded[:EXCERPT_BYTES]
        content = bytearray()
        # The event loop decodes this, so the input is small: 64 KiB can be much work, and few
        # callers read the excerpt.
        for piece in decoder.decode(encoded[:_EXCERPT_ENCODED_BYTES]):
            content += piece
    except (BadEncoding, BodyTooLarge):
        return b""
    return bytes(content)
