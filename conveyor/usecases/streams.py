"""Streams that have begun: what is missing is known before anybody is promised a body."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from conveyor.domain.errors import NotFound
from conveyor.ports.errors import BlobMissing
from conveyor.usecases.env import Env


async def begun(env: Env, key: str, *, start: int = 0, absent: str) -> AsyncGenerator[bytes, None]:
    """The body from byte `start`, its first piece in hand; NotFound where there is none."""
    pieces = env.blobs.open(key, start=start)
    try:
        first = await anext(pieces, b"")
    except BlobMissing:
        raise NotFound(absent) from None
    return _with_first(first, pieces)


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()
