"""Bodies on their way into a file: whole or absent, and checked against what the server said."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_SHA256_TAG = re.compile(r'"([0-9a-f]{64})"\Z')


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A body that is now a file."""

    size_bytes: int
    sha256: str
    content_type: str


class Damaged(Exception):
    """What arrived is not what the server has."""


class Download:
    """The pieces of one body, written and digested as they come."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def take(self, piece: bytes) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self._size_bytes += len(piece)

    def finish(self, headers: Mapping[str, str]) -> Downloaded:
        """The whole body; Damaged if the server's digest differs."""
        sha256 = self._digest.hexdigest()
        tag = _SHA256_TAG.match(headers.get("etag", ""))
        if tag is not None and tag[1] != sha256:
            raise Damaged("the body was damaged on its way")
        return Downloaded(self._size_bytes, sha256, headers.get("content-type", ""))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends well, and is gone otherwise."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with scratch.open("xb") as file:
            yield file
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
