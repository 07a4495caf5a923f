"""The laws of Blobs.put_stream: a body of any size is whole or absent, and an interrupted stream
stores nothing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import pytest
import trio

from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import BlobMissing
from tests.conformance.test_blobs import BAD_KEYS

KEY = "jobs/j/exports/r/e/1"
PIECE = bytes(range(256)) * 1024


class _Broken(Exception):
    pass


async def _stream(
    pieces: Iterable[bytes], *, then: Exception | None = None
) -> AsyncIterator[bytes]:
    for piece in pieces:
        await trio.lowlevel.checkpoint()
        yield piece
    if then is not None:
        raise then


async def _read(blobs: Blobs, key: str = KEY, *, start: int = 0) -> bytes | None:
    try:
        async with aclosing(blobs.open(key, start=start)) as parts:
            return b"".join([part async for part in parts])
    except BlobMissing:
        return None


@pytest.mark.parametrize(
    "pieces",
    [[], [b""], [b"one"], [b"a", b"", b"b"], [PIECE] * 17],
    ids=lambda pieces: str(len(pieces)),
)
async def test_a_streamed_body_is_read_as_its_joined_pieces(
    blobs: Blobs, pieces: list[bytes]
) -> None:
    body = b"".join(pieces)

    stored = await blobs.put_stream(KEY, _stream(pieces))

    assert stored == Stored(KEY, len(body), hashlib.sha256(body).hexdigest())
    assert await _read(blobs) == body
    assert await _read(blobs, start=1) == body[1:]


async def test_an_error_of_the_stream_is_raised_and_nothing_is_stored(blobs: Blobs) -> None:
    with pytest.raises(_Broken):
        await blobs.put_stream(KEY, _stream([PIECE] * 9, then=_Broken()))

    assert await _read(blobs) is None


async def test_a_failed_stream_keeps_the_previous_body(blobs: Blobs) -> None:
    await blobs.put(KEY, [b"old"])

    with pytest.raises(_Broken):
        await blobs.put_stream(KEY, _stream([PIECE] * 9, then=_Broken()))
    assert await _read(blobs) == b"old"
    await blobs.put_stream(KEY, _stream([b"new"]))

    assert await _read(blobs) == b"new"


async def test_a_cancelled_stream_stores_nothing(blobs: Blobs) -> None:
    with trio.CancelScope() as scope:

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield PIECE
                scope.cancel()
                await trio.lowlevel.checkpoint()

        await blobs.put_stream(KEY, endless())

    assert await _read(blobs) is None


async def test_no_reader_sees_a_stream_before_its_end(blobs: Blobs) -> None:
    seen: list[bytes | None] = []

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield PIECE
            seen.append(await _read(blobs))

    await blobs.put_stream(KEY, pieces())

    assert seen == [None] * 9
    assert await _read(blobs) == PIECE * 9


async def test_deleting_a_prefix_removes_streamed_bodies(blobs: Blobs) -> None:
    await blobs.put_stream(KEY, _stream([b"body"]))

    assert await blobs.delete_prefix("jobs/j/exports/r") == 1
    assert await _read(blobs) is None


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
async def test_a_stream_under_an_invalid_key_is_refused(blobs: Blobs, key: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.put_stream(key, _stream([b"body"]))
