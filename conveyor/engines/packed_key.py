"""The key of a body that is a part of a pack: it contains the body's place
(docs/storage.md, Blob keys).

So a read needs no index, and there is no table that could disagree with the packs.
"""

from __future__ import annotations

import msgspec

MARK = "pack."


class Part(msgspec.Struct, frozen=True):
    """The place of a body: the prefix and the name of its pack, its offset and its length."""

    prefix: str
    name: str
    offset: int
    size_bytes: int

    @property
    def key(self) -> str:
        return f"{self.pack_key}.{self.offset}.{self.size_bytes}"

    @property
    def pack_key(self) -> str:
        return f"{self.prefix}/{MARK}{self.name}"


def part_of(key: str) -> Part | None:
    """Returns the place of the body with this key; None if the body is not a part of a pack."""
    prefix, _, last = key.rpartition("/")
    if not last.startswith(MARK):
        return None
    name, offset, size_bytes = last.removeprefix(MARK).split(".")
    return Part(prefix, name, int(offset), int(size_bytes))


def refuse_packed(key: str) -> None:
    if key.rpartition("/")[2].startswith(MARK):
        raise ValueError(f"a key that only packed bodies have: {key!r}")
