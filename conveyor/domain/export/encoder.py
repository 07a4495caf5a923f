"""Encoder: turns tasks into the bytes of a file, in id order, keeping next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from conveyor.domain.export.entry import Entry
from conveyor.domain.export.export import Export, ExportFormat, Manifest
from conveyor.domain.export.text_formats import CsvTable, JsonLines
from conveyor.domain.export.warc import Warc
from conveyor.domain.export.zip_file import ZipFile


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


# The formats that a run's results can be had in; pure, and in step with one task at a time.


ENCODERS: dict[ExportFormat, type[Encoder]] = {
    ExportFormat.ZIP: ZipFile,
    ExportFormat.JSONL: JsonLines,
    ExportFormat.CSV: CsvTable,
    ExportFormat.WARC: Warc,
}
