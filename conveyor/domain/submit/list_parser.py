"""Reads lists: makes lines of the bytes of a list, a piece at a time (docs/api.md, Uploaded lists).

The lines do not depend on where the bytes were cut, so a list that is read again gives the same
lines. At most one line, one piece and what the piece inflates to in one step are in memory. A line
that cannot be read keeps its position: it is a draft with an error, and is judged with the others.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

from conveyor.domain import limits
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Column, ListFormat, ListSpec
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.submit.scraper_params import find_doubled_key

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # The largest window, in a gzip wrapping.
_BOM = b"\xef\xbb\xbf"
_INFLATED_BYTES = 256 * 1024
# Work that gives no lines is bounded, as for any encoded body
# (SPEC.md 5.4): tools that cut a stream
# into members make them of 64 KiB and more, and no honest data is larger when it is compressed.
_MEMBERS_MAX = 256
_MEMBER_BYTES_MIN = 4 * 1024
_SHRINKAGE_MAX = 4
_SHRINKAGE_SLACK_BYTES = 256 * 1024
# Blank lines and comments are no tasks, but they too are read.
_RAW_LINES_MAX = 10 * limits.TASKS_MAX


class ListUnusable(ConveyorError):
    """The list as a whole cannot be taken; the message is for people."""


class ListTooLarge(ListUnusable):
    """More lines or bytes than a list may have."""


class ListBroken(ListUnusable):
    """Damaged, or not what it was said to be."""


class Line(NamedTuple):
    """One line: where it begins in the file, counting from 1, and its content."""

    number: int
    draft: TaskDraft


class ListReader:
    """Takes the bytes of one list, piece by piece, and gives its lines as they become whole."""

    def __init__(self, spec: ListSpec) -> None:
        self._unzip = _Unzip()
        self._splitter = _Splitter()
        self._parser = _PARSERS[spec.format](spec)
        self._count = 0

    @property
    def is_gzip(self) -> bool:
        """Whether the list turned out to be compressed."""
        return self._unzip.is_gzip

    def feed(self, piece: bytes) -> Iterator[Line]:
        for plain in self._unzip.feed(piece):
            yield from self._count_lines(self._parser.feed(self._splitter.feed(plain)))

    def end(self) -> Iterator[Line]:
        """The lines that only the end completes; ListBroken if it came too early."""
        for plain in self._unzip.end():
            yield from self._count_lines(self._parser.feed(self._splitter.feed(plain)))
        yield from self._count_lines(self._parser.feed(self._splitter.end()))
        yield from self._count_lines(self._parser.end())

    def count_ends(self, piece: bytes) -> int:
        """How many lines the piece may end at most, quickly: for those who need no lines of this
        list any more."""
        return sum(map(_ends_in, self._unzip.feed(piece)))

    def _count_lines(self, lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            if self._count == limits.TASKS_MAX:
                raise ListTooLarge(f"The list has more than {limits.TASKS_MAX:,} lines.")
            self._count += 1
            yield line


def _ends_in(plain: bytes) -> int:
    return plain.count(b"\n") + plain.count(b"\r") - plain.count(b"\r\n")


class _Unzip:
    """Plain bytes as they are, gzip inflated; the first two bytes tell which it is."""

    def __init__(self) -> None:
        self._head = b""
        self._is_gzip: bool | None = None
        self._inflater = zlib.decompressobj(_GZIP_WINDOW)
        self._is_amid_member = False
        self._size_bytes = 0
        self._packed_bytes = 0
        self._members_count = 0

    @property
    def is_gzip(self) -> bool:
        return bool(self._is_gzip)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        if self._is_gzip is None:
            piece = self._head + piece
            self._head = piece
            if len(piece) < len(_GZIP):
                return
            self._is_gzip = piece.startswith(_GZIP)
        pieces = self._inflate(piece) if self._is_gzip else iter((piece,))
        for plain in pieces:
            self._size_bytes += len(plain)
            if self._size_bytes > limits.LIST_BYTES_MAX:
                raise ListTooLarge(f"The list has more than {limits.LIST_BYTES_MAX:,} bytes.")
            yield plain

    def end(self) -> Iterator[bytes]:
        if self._is_gzip is None and self._head:
            yield self._head
        if self._is_amid_member:
            raise ListBroken("The list is gzip data that ends too early.")

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        """A file may have several members, one after the other, and zeros for padding."""
        self._packed_bytes += len(data)
        if self._members_count and not self._is_amid_member:
            data = data.lstrip(b"\0")
        may_hold_more = False
        while data or may_hold_more:
            try:
                plain = self._inflater.decompress(data, _INFLATED_BYTES)
            except zlib.error:
                raise ListBroken("The list is damaged gzip data.") from None
            yield plain
            may_hold_more = len(plain) == _INFLATED_BYTES
            self._is_amid_member = not self._inflater.eof
            if self._inflater.eof:
                self._count_member()
                data = self._inflater.unused_data.lstrip(b"\0")
                self._inflater = zlib.decompressobj(_GZIP_WINDOW)
                may_hold_more = False
            else:
                data = self._inflater.unconsumed_tail
        if self._packed_bytes > _SHRINKAGE_MAX * self._size_bytes + _SHRINKAGE_SLACK_BYTES:
            raise ListBroken("The list is gzip data that inflates to hardly anything.")

    def _count_member(self) -> None:
        self._members_count += 1
        if self._members_count > _MEMBERS_MAX + self._size_bytes / _MEMBER_BYTES_MIN:
            raise ListBroken("The list is gzip data in too many members.")


class _Raw(NamedTuple):
    """A line of the file with its end; `is_cut` when it was too long to keep."""

    number: int
    content: bytes
    is_cut: bool


class _Splitter:
    """Cuts bytes at CR, LF and CRLF."""

    def __init__(self) -> None:
        self._rest = b""
        self._count = 0

    def feed(self, piece: bytes) -> Iterator[_Raw]:
        lines = (self._rest + piece).splitlines(keepends=True)
        # A CR at the very end may be the first half of a CRLF.
        has_rest = bool(lines) and not lines[-1].endswith(b"\n")
        rest = lines.pop() if has_rest else b""
        if len(rest) > limits.LIST_LINE_BYTES_MAX + 2:
            rest = rest[: limits.LIST_LINE_BYTES_MAX + 1] + rest[-1:]
        self._rest = rest
        yield from map(self._raw, lines)

    def end(self) -> Iterator[_Raw]:
        if self._rest:
            yield self._raw(self._rest)

    def _raw(self, line: bytes) -> _Raw:
        self._count += 1
        if self._count > _RAW_LINES_MAX:
            raise ListTooLarge(f"The list has more than {_RAW_LINES_MAX:,} lines, blank ones too.")
        if self._count == 1:
            line = line.removeprefix(_BOM)
        is_cut = (
            len(line) > limits.LIST_LINE_BYTES_MAX
            and len(line.rstrip(b"\r\n")) > limits.LIST_LINE_BYTES_MAX
        )
        return _Raw(self._count, line, is_cut)


class _Parser(Protocol):
    def feed(self, raws: Iterable[_Raw]) -> Iterator[Line]: ...

    def end(self) -> Iterator[Line]: ...


def _bad_line(number: int, flaw: str) -> Line:
    """Nothing of it is kept: it may hold what belongs sealed."""
    return Line(number, TaskDraft(url=None, flaw=flaw))


class _TextParser:
    """A URL a line; blank lines and # comments do not count."""

    def __init__(self, _: ListSpec) -> None: ...

    def feed(self, raws: Iterable[_Raw]) -> Iterator[Line]:
        for raw in raws:
            if raw.is_cut:
                yield _bad_line(raw.number, "line_too_long")
                continue
            try:
                text = raw.content.decode().strip()
            except UnicodeDecodeError:
                yield _bad_line(raw.number, "invalid_encoding")
                continue
            if text and not text.startswith("#"):
                yield Line(raw.number, TaskDraft(url=text))

    def end(self) -> Iterator[Line]:
        return iter(())


class _JsonTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of NDJSON: the same object as in a submitted list."""

    url: Any = None
    external_id: Any = None
    metadata: Any = None
    method: Any = None
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    zenrows_params: Any = None


class _NdjsonParser:
    """A JSON object a line, or a URL as a JSON text; blank lines do not count."""

    def __init__(self, _: ListSpec) -> None:
        self._decoder = msgspec.json.Decoder(_JsonTask | str)

    def feed(self, raws: Iterable[_Raw]) -> Iterator[Line]:
        for raw in raws:
            if raw.is_cut:
                yield _bad_line(raw.number, "line_too_long")
            elif content := raw.content.strip():
                yield self._line(raw.number, content)

    def _line(self, number: int, content: bytes) -> Line:
        try:
            value = self._decoder.decode(content)
            is_doubled = find_doubled_key(content) is not None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _bad_line(number, "malformed_line")
        if is_doubled:
            return _bad_line(number, "malformed_line")
        if isinstance(value, str):
            return Line(number, TaskDraft(url=value))
        draft = TaskDraft(
            url=value.url,
            external_id=value.external_id,
            metadata=value.metadata,
            method=value.method,
            body=None if value.body is msgspec.UNSET else value.body,
            params=value.zenrows_params,
        )
        return Line(number, draft)

    def end(self) -> Iterator[Line]:
        return iter(())


class _NeedsMore(Exception):
    """The record continues in lines that have not arrived yet."""


class _TooLong(Exception):
    """The record at hand is longer than any may be."""


class _Rows:
    """The lines that the csv module draws its records from.

    It forgets a record that was interrupted, so the lines of the record at hand are kept and drawn
    again when more have come.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.is_broken = False
        self._raws: list[_Raw] = []
        self._start = 0
        self._at = 0
        self._size_bytes = 0

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> str:
        if self._at == len(self._raws):
            raise StopIteration if self.is_over else _NeedsMore
        raw = self._raws[self._at]
        self._at += 1
        self._size_bytes += len(raw.content)
        if raw.is_cut or self._size_bytes > limits.LIST_LINE_BYTES_MAX + 2:
            raise _TooLong
        try:
            return raw.content.decode()
        except UnicodeDecodeError:
            self.is_broken = True
            return raw.content.decode(errors="replace")

    @property
    def first(self) -> _Raw:
        """The line that the record at hand begins with."""
        return self._raws[self._start]

    def add(self, raws: Iterable[_Raw]) -> None:
        self._raws = [*self._raws[self._start :], *raws]
        self._at = 0
        self.begin()

    def begin(self) -> None:
        """The next line begins a record."""
        self._start = self._at
        self._size_bytes = 0
        self.is_broken = False


class _CsvParser:
    """Records as the csv module reads them; empty ones do not count."""

    def __init__(self, spec: ListSpec) -> None:
        self._rows = _Rows()
        self._reader = csv.reader(self._rows, delimiter=spec.delimiter, quotechar=spec.quote)
        self._spec = spec
        self._header: list[str] | None = None if spec.header else []

    def feed(self, raws: Iterable[_Raw]) -> Iterator[Line]:
        self._rows.add(raws)
        while True:
            self._rows.begin()
            try:
                cells = next(self._reader)
            except (_NeedsMore, StopIteration):
                return
            except _TooLong:
                yield self._bad_line("line_too_long")
                continue
            if self._rows.is_broken:
                yield self._bad_line("invalid_encoding")
            elif self._header is None:
                self._header = [cell.strip() for cell in cells] or None
            elif cells:
                yield Line(self._rows.first.number, self._draft(cells, self._header))

    def end(self) -> Iterator[Line]:
        self._rows.is_over = True
        return self.feed(())

    def _bad_line(self, flaw: str) -> Line:
        if self._header is None:
            raise ListBroken("The header of the list cannot be read.")
        return _bad_line(self._rows.first.number, flaw)

    def _draft(self, cells: list[str], header: list[str]) -> TaskDraft:
        return TaskDraft(
            url=_cell(cells, header, self._spec.url),
            external_id=_cell(cells, header, self._spec.external_id) or None,
        )


def _cell(cells: list[str], header: list[str], column: Column | None) -> str | None:
    if column is None:
        return None
    if isinstance(column, str):
        if column not in header:
            raise ListBroken(f"The header has no column named {column[:64]!r}.")
        column = header.index(column)
    return cells[column].strip() if column < len(cells) else None


_PARSERS: dict[ListFormat, Callable[[ListSpec], _Parser]] = {
    ListFormat.CSV: _CsvParser,
    ListFormat.NDJSON: _NdjsonParser,
    ListFormat.TEXT: _TextParser,
}
