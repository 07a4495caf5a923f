"""Encoder: converts tasks to the bytes of a file, in id order, with little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from conveyor.domain.export.entry import Entry
from conveyor.domain.export.export import Export, ExportFormat, Manifest
from conveyor.domain.export.text_formats import CsvTable, JsonLines
from conveyor.domain.export.warc import Warc
from conveyor.domain.export.zip_file import ZipFile


class Encoder(Protocol):
    """Encodes one file. The same entries always give the same bytes, in every process.

    If `has_listing` is set, every entry is passed a second time, without its body.
    """

    suffix: ClassVar[str]
    media_type: ClassVar[str]
    needs_bodies: ClassVar[bool]
    has_listing: ClassVar[bool]

    def __init__(self, export: Export) -> None: ...

    def begin(self) -> bytes:
        """Returns the bytes before the first task."""

    def encode(self, entries: Sequence[Entry]) -> bytes:
        """Returns the bytes of the next tasks."""

    def list(self, entries: Sequence[Entry]) -> bytes:
        """Returns the bytes of the next tasks in the listing."""

    def end(self, manifest: Manifest) -> bytes:
        """Returns the bytes after the last task."""


# The formats of exports. The encoders are pure and handle one task at a time.


ENCODERS: dict[ExportFormat, type[Encoder]] = {
    ExportFormat.ZIP: ZipFile,
    ExportFormat.JSONL: JsonLines,
    ExportFormat.CSV: CsvTable,
    ExportFormat.WARC: Warc,
}
