"""Formats of exports: encoders that convert tasks to the bytes of a file, in its order, one task at
a time (docs/api.md, Exports)."""

from __future__ import annotations

import csv
import hashlib
import string
import struct
import zlib
from base64 import b32encode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from io import StringIO
from typing import ClassVar, Protocol
from urllib.parse import quote

import msgspec

from conveyor.domain.export import parquet
from conveyor.domain.export.entry import (
    LISTING,
    MANIFEST,
    Entry,
    Line,
    checked_body,
    file_name,
    instant,
    line_of,
)
from conveyor.domain.export.parquet import Parquet
from conveyor.domain.export_record import Export, ExportFormat, Manifest


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


# CsvTable: a row for each task, without its body; no cell is a formula (docs/api.md, Exports).


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
    "duplicate_of",
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
        """Nothing: a table has no place for the manifest, which the API shows beside the file."""
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


# Warc: WARC 1.1, one gzip member a record (docs/api.md, Exports).
#
# A page is a `response` record with the stored status and content type. A task without a page is a
# `metadata` record with its line. The manifest is the last record.


TASK_FIELD = "Conveyor-Task"
_JSON = "application/json"


class Warc:
    suffix: ClassVar[str] = "warc.gz"
    media_type: ClassVar[str] = "application/warc"
    needs_bodies: ClassVar[bool] = True
    has_listing: ClassVar[bool] = False

    def __init__(self, export: Export) -> None:
        self._export = export

    def begin(self) -> bytes:
        block = (
            "software: Conveyor\r\nformat: WARC File Format 1.1\r\n"
            f"isPartOf: {self._export.job_id}/{self._export.run_id}\r\n"
        ).encode()
        return self._record(
            "warcinfo", "", self._export.created_at, "application/warc-fields", block
        )

    def encode(self, entries: Sequence[Entry]) -> bytes:
        return b"".join(map(self._entry, entries))

    def list(self, entries: Sequence[Entry]) -> bytes:
        return b""

    def end(self, manifest: Manifest) -> bytes:
        block = msgspec.json.encode(manifest)
        return self._record("metadata", "manifest", self._export.created_at, _JSON, block)

    def _entry(self, entry: Entry) -> bytes:
        task = entry.task
        about = {"WARC-Target-URI": task.url, TASK_FIELD: f"{task.task_id} {entry.status}"}
        if not entry.has_body:
            line = msgspec.json.encode(line_of(entry))
            return self._record("metadata", task.task_id, task.updated_at, _JSON, line, **about)
        assert task.result is not None
        body = checked_body(entry)
        about["WARC-Payload-Digest"] = digest_of(body)
        head = (
            f"HTTP/1.1 {status_line(task.result.http_status)}\r\n"
            f"Content-Type: {entry.content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        kind = "application/http; msgtype=response"
        return self._record("response", task.task_id, task.updated_at, kind, head + body, **about)

    def _record(
        self, kind: str, name: str, at: float, content_type: str, block: bytes, **about: str
    ) -> bytes:
        record_name = f"{self._export.export_id}/{name}"
        return record_of(kind, record_name, instant(at), content_type, block, about)


def record_of(
    kind: str, name: str, date: str, content_type: str, block: bytes, about: Mapping[str, str]
) -> bytes:
    """Returns one record as a gzip member. `name` distinguishes it from every other record. In
    `about`, what is not ASCII is escaped as in a URI."""
    fields = {
        "WARC-Type": kind,
        "WARC-Record-ID": _record_id(name),
        "WARC-Date": date,
        **{field: quote(value, safe=string.printable) for field, value in about.items()},
        "WARC-Block-Digest": digest_of(block),
        "Content-Type": content_type,
        "Content-Length": str(len(block)),
    }
    head = "".join(f"{field}: {value}\r\n" for field, value in fields.items())
    text = f"WARC/1.1\r\n{head}\r\n".encode()
    return zlib.compress(text + block + b"\r\n\r\n", 1, wbits=31)


def status_line(status: int) -> str:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
    return f"{status} {phrase}"


def digest_of(data: bytes) -> str:
    return "sha256:" + b32encode(hashlib.sha256(data).digest()).decode()


def _record_id(text: str) -> str:
    """A UUID of our own making (version 8): the same record has the same one each time."""
    digits = hashlib.sha256(text.encode()).hexdigest()
    parts = (digits[:8], digits[8:12], "8" + digits[13:16], "a" + digits[17:20], digits[20:32])
    return f"<urn:uuid:{'-'.join(parts)}>"


# ZipFile: a file for each body, then a listing of all tasks, then the manifest
# (docs/api.md, Exports).
#
# Written by hand: general writers hold a kilobyte per entry in memory, and this one holds a row of
# the directory, 80 bytes. The whole body is in memory when its header is written, so the header has
# its size. Only the listing, which may be longer than memory, is followed by its sizes.


_STORED, _DEFLATED = 0, 8
_LEVEL = 1  # A page shrinks to a quarter; the best level takes four times as long for a fifth.
_PLAIN, _LARGE = 20, 45  # Versions needed to read: deflate, and more than 4 GiB.
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_SIZES_FOLLOW = 0x08
_UNIX = 3 << 8
_MODE = 0o100644 << 16


class ZipFile:
    suffix: ClassVar[str] = "zip"
    media_type: ClassVar[str] = "application/zip"
    needs_bodies: ClassVar[bool] = True
    has_listing: ClassVar[bool] = True

    def __init__(self, export: Export) -> None:
        self._at = _dos_instant(export.created_at)
        self._offset = 0
        self._directory = bytearray()
        self._count = 0
        self._listing: _Listing | None = None

    def begin(self) -> bytes:
        return b""

    def encode(self, entries: Sequence[Entry]) -> bytes:
        return b"".join(
            self._file(file_name(entry), checked_body(entry), _dos_instant(entry.task.updated_at))
            for entry in entries
            if entry.has_body
        )

    def list(self, entries: Sequence[Entry]) -> bytes:
        header = b"" if self._listing else self._begin_listing()
        assert self._listing is not None
        lines = [_with_file(entry) for entry in entries]
        return self._written(
            header + self._listing.take(msgspec.json.Encoder().encode_lines(lines))
        )

    def end(self, manifest: Manifest) -> bytes:
        listing = self.list([]) + self._end_listing()
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        return listing + self._file(MANIFEST, text, self._at) + self._end_directory()

    def _written(self, data: bytes) -> bytes:
        self._offset += len(data)
        return data

    def _file(self, name: str, body: bytes, at: int) -> bytes:
        packed = zlib.compress(body, _LEVEL, wbits=-15)
        method = _DEFLATED if len(packed) < len(body) else _STORED
        data = packed if method == _DEFLATED else body
        crc, encoded = zlib.crc32(body), name.encode()
        facts = struct.pack("<HHIIIIHH", 0, method, at, crc, len(data), len(body), len(encoded), 0)
        self._enter(encoded, facts)
        return self._written(b"PK\3\4" + struct.pack("<H", _PLAIN) + facts + encoded + data)

    def _enter(self, name: bytes, facts: bytes) -> None:
        """A row of the directory, for an entry whose sizes fit into 32 bits."""
        extra = b""
        offset = self._offset
        if offset >= _FULL32:
            extra = struct.pack("<HHQ", 1, 8, offset)
            offset = _FULL32
        version = _LARGE if extra else _PLAIN
        self._add_row(name, version, facts, extra, offset)

    def _add_row(self, name: bytes, version: int, facts: bytes, extra: bytes, offset: int) -> None:
        self._directory += b"PK\1\2" + struct.pack("<HH", _UNIX | _LARGE, version) + facts[:-2]
        self._directory += struct.pack("<HHHHII", len(extra), 0, 0, 0, _MODE, offset) + name + extra
        self._count += 1

    def _begin_listing(self) -> bytes:
        self._listing = _Listing(self._offset)
        name = LISTING.encode()
        facts = struct.pack(
            "<HHIIIIHH", _SIZES_FOLLOW, _DEFLATED, self._at, 0, _FULL32, _FULL32, len(name), 20
        )
        sizes = struct.pack("<HHQQ", 1, 16, 0, 0)
        return b"PK\3\4" + struct.pack("<H", _LARGE) + facts + name + sizes

    def _end_listing(self) -> bytes:
        listing = self._listing
        assert listing is not None
        rest = listing.finish()
        sizes = struct.pack("<QQ", listing.packed_bytes, listing.plain_bytes)
        name = LISTING.encode()
        facts = struct.pack(
            "<HHIIIIHH",
            _SIZES_FOLLOW,
            _DEFLATED,
            self._at,
            listing.crc,
            _FULL32,
            _FULL32,
            len(name),
            0,
        )
        extra = struct.pack(
            "<HHQQQ", 1, 24, listing.plain_bytes, listing.packed_bytes, listing.offset
        )
        self._add_row(name, _LARGE, facts, extra, _FULL32)
        return self._written(rest + b"PK\7\10" + struct.pack("<I", listing.crc) + sizes)

    def _end_directory(self) -> bytes:
        """The directory, its place in 64 bits for who needs them, and its place in 32."""
        start, size = self._offset, len(self._directory)
        large = struct.pack(
            "<QHHIIQQQQ",
            44,
            _UNIX | _LARGE,
            _LARGE,
            0,
            0,
            self._count,
            self._count,
            size,
            start,
        )
        where = struct.pack("<IQI", 0, start + size, 1)
        count = min(self._count, _FULL16)
        plain = struct.pack(
            "<HHHHIIH", 0, 0, count, count, min(size, _FULL32), min(start, _FULL32), 0
        )
        return bytes(self._directory) + b"PK\6\6" + large + b"PK\6\7" + where + b"PK\5\6" + plain


class _Listing:
    """An entry whose length is not known yet."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.crc = 0
        self.plain_bytes = 0
        self.packed_bytes = 0
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)

    def take(self, data: bytes) -> bytes:
        self.crc = zlib.crc32(data, self.crc)
        self.plain_bytes += len(data)
        return self._counted(self._packer.compress(data))

    def finish(self) -> bytes:
        return self._counted(self._packer.flush())

    def _counted(self, packed: bytes) -> bytes:
        self.packed_bytes += len(packed)
        return packed


def _with_file(entry: Entry) -> object:
    line = line_of(entry)
    return msgspec.structs.replace(line, file=file_name(entry)) if entry.has_body else line


def _dos_instant(at: float) -> int:
    """Two seconds are as fine as it gets, and 1980 as early."""
    when = datetime.fromtimestamp(max(at, 315_532_800.0), UTC)
    date = (when.year - 1980) << 9 | when.month << 5 | when.day
    return date << 16 | when.hour << 11 | when.minute << 5 | when.second // 2


ENCODERS: dict[ExportFormat, type[Encoder]] = {
    ExportFormat.ZIP: ZipFile,
    ExportFormat.JSONL: JsonLines,
    ExportFormat.CSV: CsvTable,
    ExportFormat.WARC: Warc,
    ExportFormat.PARQUET: Parquet,
}


def missing_package(kind: ExportFormat) -> str | None:
    """Returns what must be installed before this process can write the format; None if nothing."""
    is_missing = kind is ExportFormat.PARQUET and not parquet.is_available()
    return "conveyor[parquet]" if is_missing else None
