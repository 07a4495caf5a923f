"""Streams: a body that comes piece by piece, of any size, and still appears whole
(docs/storage.md, Blob keys).

Pieces are gathered before they go to a thread: a hop for each would cost more than its write.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from conveyor.engines.embedded.errors import raise_translated_os
from conveyor.engines.embedded.hands import Hands

T = TypeVar("T")

_GATHER_BYTES = 1024 * 1024
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Scratch:
    """A file in the making, which is gone unless it was kept. Used by one thread at a time."""

    def __init__(self, path: str, check_room: Callable[[int], None]) -> None:
        self.path = path
        self._check_room = check_room
        self.size_bytes = 0
        self._descriptor = os.open(path, _NEW_FILE, 0o600)
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, pieces: list[bytes]) -> None:
        self._check_room(sum(map(len, pieces)))
        for piece in pieces:
            self._digest.update(piece)
            self.size_bytes += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            Path(self.path).unlink()


async def aside(hands: Hands, step: Callable[..., T], *arguments: Any) -> T:
    """One step of ours: its errors are told in the words of the port, and nobody else's."""
    try:
        return await hands.do(step, *arguments)
    except OSError as error:
        raise_translated_os(error)


async def fill(hands: Hands, scratch: Scratch, pieces: AsyncIterable[bytes]) -> None:
    """Writes every piece and syncs; whatever the iterator raises comes through."""
    gathered: list[bytes] = []
    size_bytes = 0
    async for piece in pieces:
        gathered.append(piece)
        size_bytes += len(piece)
        if size_bytes >= _GATHER_BYTES:
            await aside(hands, scratch.write, gathered)
            gathered, size_bytes = [], 0
    await aside(hands, scratch.write, gathered)
    await aside(hands, scratch.sync)


def digest_file(path: str) -> tuple[int, str]:
    """The length of a file, and its SHA-256."""
    digest, size_bytes = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while data := file.read(_GATHER_BYTES):
            digest.update(data)
            size_bytes += len(data)
    return size_bytes, digest.hexdigest()
