"""Streams: bodies that come piece by piece, and digests of files (SPEC 5.5).

A body is written to a temporary file as it comes and appears whole, by its rename.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio

from conveyor.engines.embedded.errors import raise_translated_os

T = TypeVar("T")

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_BUFFER_BYTES = 1024 * 1024


class Digest:
    """The length and the SHA-256 of what has passed."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        self.size_bytes += len(data)


def digest_file(path: str) -> Digest:
    digest = Digest()
    with open(path, "rb") as file:
        while data := file.read(_BUFFER_BYTES):
            digest.update(data)
    return digest


async def spool(pieces: AsyncIterable[bytes], temp: str, land: Callable[[], None]) -> Digest:
    """Writes the pieces to `temp`, syncs it and lands it; cut off, it leaves nothing behind."""
    digest = Digest()
    descriptor = await _in_thread(partial(os.open, temp, _NEW_FILE, 0o600))
    try:
        buffer = bytearray()
        async for piece in pieces:
            buffer += piece
            if len(buffer) >= _BUFFER_BYTES:
                await _in_thread(partial(_write, descriptor, bytes(buffer), digest))
                buffer.clear()
        await _in_thread(partial(_write, descriptor, bytes(buffer), digest))
        await _in_thread(partial(os.fsync, descriptor))
        await _in_thread(land)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(temp)
    return digest


async def _in_thread(step: Callable[[], T]) -> T:
    try:
        return await trio.to_thread.run_sync(step)
    except OSError as error:
        raise_translated_os(error)


def _write(descriptor: int, data: bytes, digest: Digest) -> None:
    digest.update(data)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
