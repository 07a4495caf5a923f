"""Encoder: turns tasks into the bytes of a file, in id order, keeping next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from conveyor.domain.export import Export, Manifest
from conveyor.domain.formats.entry import Entry


class Encoder(Protocol):
    """One file in the making. The same entries make the same bytes, whoever encodes them.

    Where `has_listing` is set, every entry passes a second time, without its body.
    """

    suffix: ClassVar[str]
    media_type: ClassVar[str]
    needs_bodies: ClassVar[bool]
    has_listing: ClassVar[bool]

    def __init__(self, export: Export) -> None: ...

    def begin(self) -> bytes:
        """What comes before the first task."""

    def encode(self, entries: Sequence[Entry]) -> bytes:
        """The next tasks."""

    def list(self, entries: Sequence[Entry]) -> bytes:
        """The next tasks of the listing."""

    def end(self, manifest: Manifest) -> bytes:
        """What comes after the last task."""
