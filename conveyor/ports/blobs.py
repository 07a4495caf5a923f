"""Blobs: bodies and staged lists, each whole or absent (docs/storage.md, Blob keys)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Protocol

import msgspec


class Stored(msgspec.Struct, frozen=True):
    """A stored body: its key, its length and its digest."""

    key: str
    size_bytes: int
    sha256: str


class Blobs(Protocol):
    """Laws:

    - A body is whole or absent: no reader ever sees a part of a put.
    - A put that has returned is durable.
    - A put under an existing key replaces the body as a whole.
    - A copy is independent of its original.
    - Deleting a prefix removes every body under it, and no other body.
    - Keys are relative paths of plain segments; any other key raises ValueError.
    - Any method may raise Unavailable, and StorageFull if there is no room.
    """

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        """Stores the joined parts under `key`."""

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        """Stores a body of any size while it arrives, with only a few pieces of it in memory.

        Errors of the iterator are raised as they are, and then nothing is stored.
        """

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        """Stores the current body of `key` also under `to`. Raises BlobMissing if there is none. A
        body of more than `bytes_max` is neither read nor copied: BlobTooLarge."""

    async def upload_url(self, key: str, *, content_type: str, expires_at: float) -> str | None:
        """Returns a URL to which a caller may upload the body of `key` directly. Returns None if
        the engine has no such URLs, and the body must come through `put_stream`."""

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str | None:
        """Returns a URL from which the body of `key` can be downloaded directly, as a file of this
        name and type; it may end before `expires_at`. Returns None if the engine has no such URLs,
        and the body must be streamed through `open`. The method does not check whether the body
        exists."""

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        """Stores the joined parts under a key below `prefix` that the engine chooses.

        `name`, a plain segment, identifies the body: no name is added twice.
        """

    # Not async, because it is called before every fetch.
    def check_room(self) -> None:
        """Called before a page is fetched. Raises StorageFull if its body should not be added now,
        while there is still room for the bodies of the pages in flight.

        It costs almost nothing. If the engine cannot know its free space, it does not raise.
        """

    # Not async: it returns the generator, and errors are raised when the first piece is read.
    def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Streams the body from byte `start`. Raises BlobMissing if there is none."""

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Removes all bodies whose key starts with `prefix/`. Returns 0 if there were none.

        With a `limit` it stops after about that many, or more.
        """
