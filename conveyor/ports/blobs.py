"""Blobs: bodies and staged lists, each whole or absent (docs/storage.md, Blob keys)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Protocol

import msgspec


class Stored(msgspec.Struct, frozen=True):
    """What was stored: the key to open it by, its length and its digest."""

    key: str
    size_bytes: int
    sha256: str


class Blobs(Protocol):
    """Laws:

    - A body is whole or absent: no reader ever sees part of a put.
    - A put that returned is durable.
    - Putting again under a key replaces the body as a whole.
    - A copy stands for itself, whatever becomes of the original.
    - Deleting a prefix removes every body under it, and nothing beside it.
    - Keys are relative paths of plain segments; anything else is refused with ValueError.
    - Any method may raise Unavailable, StorageFull when there is no room.
    """

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        """Stores the parts, joined, under `key`."""

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        """Stores a body of any size as it comes, holding no more than a few pieces of it.

        Whatever the iterator raises comes through, and then nothing was stored.
        """

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        """Stores the body that was put at `key` under `to` as well, as it is now; BlobMissing
        when there is none. One of more than `bytes_max` is not copied, nor read: BlobTooLarge."""

    async def upload_url(self, key: str, *, content_type: str, expires_at: float) -> str | None:
        """Where a caller may put the body at `key` without us; None when that is not offered, and
        it has to come through `put_stream`."""

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str | None:
        """Where anybody may get the body at `key` without us, as a file of this name and type; it
        may end before `expires_at`. None when that is not offered, and it has to come through
        `open`. Whether there is a body is not looked at."""

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        """Stores the parts, joined, under a key of the engine's choosing below `prefix`.

        `name`, a plain segment, tells apart what is added: nothing is added twice by one name.
        """

    def check_room(self) -> None:
        """Asked before a page is fetched: StorageFull when its body should not be added now, which
        is while there is still room for the bodies of the pages that are in flight.

        It costs next to nothing, and where there is no way to know it is silent.
        """

    def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Streams the body from byte `start`; BlobMissing when there is none."""

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Removes all bodies whose key starts with `prefix/`; answers 0 if there were none.

        With a `limit` it stops when about so many are gone, or more.
        """
