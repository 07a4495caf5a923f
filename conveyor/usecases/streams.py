"""Stored bodies on their way out: what is missing or damaged never looks like a whole body.

A short body is read and checked before anything is said about it. A longer one is checked as it
goes, and its last piece is held back until its digest is known: whoever reads it sees too few bytes
rather than wrong ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator

from conveyor.domain.errors import NotFound, ResultDamaged
from conveyor.ports.errors import BlobMissing, StorageDamaged
from conveyor.usecases.env import Env

# Read as a whole before it is promised: as much as most pages have, and a moment's work.
CHECKED_BYTES_MAX = 1024 * 1024

_DAMAGED = "The stored bytes are not those that were fetched; run the task again."


async def whole_body(
    env: Env, key: str, *, size_bytes: int, sha256: str, absent: str
) -> AsyncGenerator[bytes, None]:
    """The body, checked against its length and digest; NotFound where there is none, and
    ResultDamaged, at once or at the end, where it is another."""
    body = await begun(env, key, absent=absent)
    pieces = _checked(body, size_bytes, sha256)
    if size_bytes > CHECKED_BYTES_MAX:
        return pieces
    return _single(b"".join([piece async for piece in pieces]))


async def part_of_body(
    env: Env, key: str, *, start: int, end: int, absent: str
) -> AsyncGenerator[bytes, None]:
    """The bytes from `start` to before `end`; ResultDamaged at the end where there are fewer."""
    return _cut(await begun(env, key, start=start, absent=absent), end - start)


async def begun(env: Env, key: str, *, start: int = 0, absent: str) -> AsyncGenerator[bytes, None]:
    """The body from byte `start`, its first piece in hand; NotFound where there is none."""
    pieces = env.blobs.open(key, start=start)
    try:
        first = await anext(pieces, b"")
    except BlobMissing:
        raise NotFound(absent) from None
    except StorageDamaged:
        raise ResultDamaged(_DAMAGED) from None
    return _with_first(first, pieces)


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    except StorageDamaged:
        raise ResultDamaged(_DAMAGED) from None
    finally:
        await rest.aclose()


async def _checked(
    pieces: AsyncGenerator[bytes, None], size_bytes: int, sha256: str
) -> AsyncGenerator[bytes, None]:
    digest, seen_bytes, held = hashlib.sha256(), 0, b""
    try:
        async for piece in pieces:
            digest.update(piece)
            seen_bytes += len(piece)
            if held:
                yield held
            held = piece
            if seen_bytes > size_bytes:
                break
    finally:
        await pieces.aclose()
    if seen_bytes != size_bytes or digest.hexdigest() != sha256:
        raise ResultDamaged(_DAMAGED)
    yield held


async def _cut(pieces: AsyncGenerator[bytes, None], size_bytes: int) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece[:size_bytes]
            size_bytes -= len(piece)
            if size_bytes <= 0:
                return
    finally:
        await pieces.aclose()
    if size_bytes > 0:
        raise ResultDamaged(_DAMAGED)


async def _single(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
