"""CsvTable: a row for each task, without its body; no cell is a formula (docs/api.md, Exports)."""

from __future__ import annotations

import csv
from base64 import b64encode
from collections.abc import Sequence
from io import StringIO
from typing import ClassVar

import msgspec

from conveyor.domain.export.entry import Entry, Line, checked_body, line_of
from conveyor.domain.export.export import Export, Manifest

COLUMNS = (
    "task_id",
    "index",
    "url",
    "status",
    "updated_at",
    "method",
    "external_id",
    "metadata",
    "http_status",
    "content_type",
    "size_bytes",
    "sha256",
    "source_run_id",
    "error_code",
    "error_detail",
)
# What a spreadsheet reads as the start of a formula; the last two are how it writes = and +.
_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b")


class CsvTable:
    suffix: ClassVar[str] = "csv"
    media_type: ClassVar[str] = "text/csv; charset=utf-8; header=present"
    needs_bodies: ClassVar[bool] = False
    has_listing: ClassVar[bool] = False

    def __init__(self, export: Export) -> None:
        pass

    def begin(self) -> bytes:
        return _written([COLUMNS])

    def encode(self, entries: Sequence[Entry]) -> bytes:
        return _written([_row(entry) for entry in entries])

    def list(self, entries: Sequence[Entry]) -> bytes:
        return b""

    def end(self, manifest: Manifest) -> bytes:
        """Nothing: a table has no place for it. It is told beside the file."""
        return b""


def _written(rows: Sequence[Sequence[object]]) -> bytes:
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def _row(entry: Entry) -> list[object]:
    line = line_of(entry)
    problem = line.error
    cells = msgspec.structs.asdict(line) | {
        "metadata": msgspec.json.encode(line.metadata).decode() if line.metadata else None,
        "error_code": problem.code if problem else None,
        "error_detail": problem.detail if problem else None,
    }
    return [safe_cell(cells[column]) for column in COLUMNS]


def safe_cell(value: object) -> object:
    """An apostrophe in front makes text of what would be a formula."""
    if isinstance(value, str) and value.lstrip(" ").startswith(_STARTS):
        return f"'{value}"
    return value


# JsonLines: a line of JSON for each task, its body included; the last line is the manifest.


class LastLine(msgspec.Struct, frozen=True):
    manifest: Manifest


class JsonLines:
    suffix: ClassVar[str] = "jsonl"
    media_type: ClassVar[str] = "application/x-ndjson"
    needs_bodies: ClassVar[bool] = True
    has_listing: ClassVar[bool] = False

    def __init__(self, export: Export) -> None:
        self._encoder = msgspec.json.Encoder()

    def begin(self) -> bytes:
        return b""

    def encode(self, entries: Sequence[Entry]) -> bytes:
        return self._encoder.encode_lines([_with_body(entry) for entry in entries])

    def list(self, entries: Sequence[Entry]) -> bytes:
        return b""

    def end(self, manifest: Manifest) -> bytes:
        return self._encoder.encode_lines([LastLine(manifest)])


def _with_body(entry: Entry) -> Line:
    line = line_of(entry)
    if not entry.has_body:
        return line
    body = checked_body(entry)
    try:
        return msgspec.structs.replace(line, body=body.decode())
    except UnicodeDecodeError:
        return msgspec.structs.replace(line, body_base64=b64encode(body).decode())
