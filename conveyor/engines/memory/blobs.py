"""MemoryBlobs: bodies in a dict (docs/storage.md, Blob keys)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence

import trio

from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, BlobTooLarge

PART_BYTES = 64 * 1024

# No segment starts with a dot. This refuses `.` and `..`.
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*\Z")


class MemoryBlobs:
    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    def bodies(self) -> Mapping[str, bytes]:
        """Returns every body by its key, for checkers."""
        return self._bodies

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        _check(key)
        await trio.lowlevel.checkpoint()
        body = b"".join(parts)
        self._bodies[key] = body
        return Stored(key, len(body), hashlib.sha256(body).hexdigest())

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        _check(key)
        return await self.put(key, [piece async for piece in pieces])

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        _check(key)
        await trio.lowlevel.checkpoint()
        if key not in self._bodies:
            raise BlobMissing(key)
        if bytes_max is not None and len(self._bodies[key]) > bytes_max:
            raise BlobTooLarge(key)
        return await self.put(to, [self._bodies[key]])

    async def upload_url(self, key: str, *, content_type: str, expires_at: float) -> str | None:
        _check(key)
        await trio.lowlevel.checkpoint()
        return None

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str | None:
        _check(key)
        await trio.lowlevel.checkpoint()
        return None

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        return await self.put(f"{prefix}/{name}", parts)

    def check_room(self) -> None:
        """Does nothing: this engine has no limit."""

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        _check(key)
        await trio.lowlevel.checkpoint()
        if key not in self._bodies:
            raise BlobMissing(key)
        # The reader continues with this body even if the key is replaced or deleted meanwhile.
        body = self._bodies[key]
        for offset in range(start, len(body), PART_BYTES):
            yield body[offset : offset + PART_BYTES]
            await trio.lowlevel.checkpoint()

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        _check(prefix)
        await trio.lowlevel.checkpoint()
        doomed = [key for key in self._bodies if key.startswith(f"{prefix}/")]
        for key in doomed[:limit]:
            del self._bodies[key]
        return len(doomed[:limit])


def _check(key: str) -> None:
    if not _KEY.match(key):
        raise ValueError(f"not a blob key: {key!r}")
