"""ZipFile: a file for each body, then a listing of all tasks, then the manifest
(docs/api.md, Exports).

Written by hand because it is small and every general writer keeps a kilobyte per entry: here it is
one row of the directory, 80 bytes. A body is at hand when its header is written, so its header
tells its size; only the listing, which may be longer than memory, is followed by its sizes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import ClassVar

import msgspec

from conveyor.domain.export.entry import LISTING, MANIFEST, Entry, checked_body, file_name, line_of
from conveyor.domain.export.export import Export, Manifest

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
    """An entry whose length nobody knows yet."""

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
