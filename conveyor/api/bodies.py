"""Request bodies: how large, how slow and of which kind they may be (SPEC 4.1)."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing
from typing import cast

import trio
from quart import Request

from conveyor.api.flow import Event, took
from conveyor.api.problems import LengthRequired, TooLarge, TooSlow, UnsupportedMedia
from conveyor.domain.errors import InvalidArgument
from conveyor.net.decoding import Gzip

BODY_TIMEOUT_S = 30.0
BYTES_PER_S_MIN = 64 * 1024

_PLAIN, _GZIP = "identity", "gzip"


def require_json(request: Request) -> None:
    """Before a byte is read: only JSON, in UTF-8, as it is."""
    if request.mimetype != "application/json":
        raise UnsupportedMedia("Send the body as application/json.")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in {"utf-8", "utf8"}:
        raise UnsupportedMedia("JSON is UTF-8; leave the charset out.")


def require_plain(request: Request) -> None:
    if _encoding(request) != _PLAIN:
        raise UnsupportedMedia("Send the body without a Content-Encoding.")


def _encoding(request: Request) -> str:
    return request.headers.get("Content-Encoding", "").strip().lower() or _PLAIN


async def body_pieces(request: Request, *, bytes_max: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes, inflated if it is gzip. A large one has longer to arrive; one that
    dawdles is cut off."""
    encoding = _encoding(request)
    if encoding not in {_PLAIN, _GZIP}:
        raise UnsupportedMedia("Send the body as it is, or as gzip.")
    async with aclosing(_pieces(request, bytes_max)) as pieces:
        if encoding == _PLAIN:
            async for piece in pieces:
                yield piece
            return
        codec, size_bytes = Gzip(), 0
        async for piece in pieces:
            for plain in _inflated(codec, piece):
                await trio.lowlevel.checkpoint()
                size_bytes += len(plain)
                if size_bytes > bytes_max:
                    raise _too_large(bytes_max)
                yield plain
        if not codec.is_complete():
            raise _not_gzip()


def _inflated(codec: Gzip, piece: bytes) -> Iterator[bytes]:
    try:
        yield from codec.decode(piece)
    except zlib.error:
        raise _not_gzip() from None


def _not_gzip() -> InvalidArgument:
    return InvalidArgument("The body is not the gzip data that its Content-Encoding says.")


async def read_start(pieces: AsyncIterable[bytes], *, bytes_max: int) -> tuple[bytes, bool]:
    """The body up to so many bytes and a piece, and whether that is all of it."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > bytes_max:
            return bytes(body), False
    return bytes(body), True


async def take_body(request: Request, *, bytes_max: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes, no faster than it is taken. How long it is must be said before."""
    left = request.content_length
    if left is None:
        raise LengthRequired("Say how long the body is, with a Content-Length.")
    async with aclosing(_pieces(request, bytes_max)) as pieces:
        async for piece in pieces:
            left -= len(piece)
            yield piece
    if left:
        raise InvalidArgument("The body is not as long as its Content-Length says.")


async def _pieces(request: Request, bytes_max: int) -> AsyncGenerator[bytes, None]:
    if request.content_length is not None and request.content_length > bytes_max:
        raise _too_large(bytes_max)
    size_bytes = 0
    begun = trio.current_time()
    body = aiter(request.body)
    while True:
        deadline = begun + BODY_TIMEOUT_S + size_bytes / BYTES_PER_S_MIN
        piece = b""
        with trio.move_on_at(deadline) as scope:
            piece = await anext(body, b"")
        if scope.cancelled_caught:
            raise TooSlow("The body did not arrive in time.")
        if not piece:
            return
        took(cast("Event", request.scope), len(piece))
        size_bytes += len(piece)
        if size_bytes > bytes_max:
            raise _too_large(bytes_max)
        yield piece


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"The body may have at most {bytes_max} bytes.")
