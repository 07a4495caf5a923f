"""Writes pages: as files, or as records of one JSON Lines or WARC file.

Groups of pages are written in a thread, because a thread hop costs more than a write. A page
returns from `put` when its whole group is written and settled, so a page that is being written
counts as in flight.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

import msgspec
import trio

from conveyor.cli.scrape.folder import cannot_write
from conveyor.cli.scrape.options import PageFormat
from conveyor.cli.scrape.pages import Answer, Page
from conveyor.domain.errors import ConveyorError
from conveyor.domain.export.formats import digest_of, record_of, status_line
from conveyor.domain.submit.scraper_params import extension_for
from conveyor.domain.submit.target import Target, parse_url

Settle = Callable[[Sequence[Answer]], None]


class Written(msgspec.Struct, frozen=True):
    """Where a page is."""

    file: str
    offset: int | None = None
    length: int | None = None


class Format(Protocol):
    """Writes pages one after the other; called in a thread."""

    def write(self, answer: Answer, page: Page, body: bytes) -> Written: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class PageFiles:
    """One file per page: written under a temporary name, then renamed."""

    def __init__(self, folder: Path, scratch: Path, namer: Namer) -> None:
        self._folder = os.fspath(folder) + "/"
        self._scratch = f"{os.fspath(scratch)}/{os.getpid()}-"
        self._name = namer
        self._numbers = count()
        self._made: set[str] = set()

    def write(self, answer: Answer, page: Page, body: bytes) -> Written:
        name = self._name(answer.index, page, answer.content_type or "")
        parent = name.rpartition("/")[0]
        if parent and parent not in self._made:
            os.makedirs(self._folder + parent, exist_ok=True)
            self._made.add(parent)
        scratch = self._scratch + str(next(self._numbers))
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            written = os.write(descriptor, body)
            while written < len(body):
                written += os.write(descriptor, memoryview(body)[written:])
        finally:
            os.close(descriptor)
        os.rename(scratch, self._folder + name)
        return Written(name)

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None


class PageRecords:
    """All pages in one file. Bytes behind the last line of results.jsonl are of a page that was
    cut off; they are dropped at the start."""

    def __init__(self, path: Path, end: int) -> None:
        self._file = path.open("ab")
        self._file.truncate(end)
        self._end = end
        self._name = path.name

    def add(self, record: bytes) -> Written:
        self._file.write(record)
        written = Written(self._name, self._end, len(record))
        self._end += len(record)
        return written

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _JsonPage(msgspec.Struct, omit_defaults=True):
    index: int
    url: str
    http_status: int | None
    content_type: str | None
    id: str | None = None
    final_url: str | None = None
    body: str | None = None
    body_base64: str | None = None


class JsonLines(PageRecords):
    """pages.jsonl: one object per page. A body that is not UTF-8 text is in base64."""

    def write(self, answer: Answer, page: Page, body: bytes) -> Written:
        line = _JsonPage(
            answer.index,
            page.url,
            answer.http_status,
            answer.content_type,
            page.id,
            answer.final_url,
        )
        try:
            line.body = body.decode()
        except UnicodeDecodeError:
            line.body_base64 = base64.b64encode(body).decode()
        return self.add(msgspec.json.encode(line) + b"\n")


class WarcRecords(PageRecords):
    """pages.warc.gz: WARC 1.1, one gzip member per record."""

    def __init__(self, path: Path, end: int) -> None:
        super().__init__(path, end)
        if end == 0:
            block = b"software: Conveyor\r\nformat: WARC File Format 1.1\r\n"
            self.add(self._record("warcinfo", "info", "application/warc-fields", block, {}))

    def write(self, answer: Answer, page: Page, body: bytes) -> Written:
        about = {
            "WARC-Target-URI": answer.final_url or page.url,
            "WARC-Payload-Digest": digest_of(body),
        }
        head = (
            f"HTTP/1.1 {status_line(answer.http_status or 200)}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        kind = "application/http; msgtype=response"
        name = f"{answer.index}/{answer.sha256}"
        return self.add(self._record("response", name, kind, head + body, about))

    @staticmethod
    def _record(
        kind: str, name: str, content_type: str, block: bytes, about: dict[str, str]
    ) -> bytes:
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return record_of(kind, f"scrape/{name}/{date}", date, content_type, block, about)


SHARED_FILES = {PageFormat.JSONL: "pages.jsonl", PageFormat.WARC: "pages.warc.gz"}


def open_format(
    page_format: PageFormat, folder: Path, scratch: Path, namer: Namer, end: int
) -> Format:
    """`end` is where the last page that counts ends in a shared file."""
    try:
        match page_format:
            case PageFormat.FILES:
                return PageFiles(folder, scratch, namer)
            case PageFormat.JSONL:
                return JsonLines(folder / SHARED_FILES[page_format], end)
            case PageFormat.WARC:
                return WarcRecords(folder / SHARED_FILES[page_format], end)
    except OSError as error:
        raise cannot_write(folder, error) from error


class PageWriter:
    """Groups the pages of one process. `settle` gets the answers of each written group."""

    def __init__(
        self, folder: Path, pages: Sequence[Page], page_format: Format, settle: Settle
    ) -> None:
        self._folder = folder
        self._pages = pages
        self._format = page_format
        self._settle = settle
        self._group: list[tuple[Answer, bytes]] = []
        self._has_group = trio.Event()
        self._is_written = trio.Event()

    async def put(self, answer: Answer, body: bytes) -> None:
        """Writes and settles one page."""
        self._group.append((answer, body))
        self._has_group.set()
        await self._is_written.wait()

    async def run(self) -> None:
        """Writes groups until it is cancelled. A group that has begun is finished."""
        with closing(self._format):
            while True:
                await self._has_group.wait()
                group, is_written = self._group, self._is_written
                self._group, self._is_written, self._has_group = [], trio.Event(), trio.Event()
                with trio.CancelScope(shield=True):
                    await self._write(group)
                is_written.set()

    async def _write(self, group: list[tuple[Answer, bytes]]) -> None:
        try:
            await trio.to_thread.run_sync(self._write_group, group)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        self._settle([answer for answer, _ in group])

    def _write_group(self, group: list[tuple[Answer, bytes]]) -> None:
        write, pages = self._format.write, self._pages
        for answer, body in group:
            answer.sha256 = sha256(body).hexdigest()
            answer.size_bytes = len(body)
            written = write(answer, pages[answer.index], body)
            answer.file, answer.offset, answer.length = written.file, written.offset, written.length
        self._format.flush()


# Names of page files: `--name` patterns such as `{host}/{path}`.

FIELDS = ("index", "host", "path", "id")
# File systems allow 255 bytes in one part of a path; the extension and a number need some.
_PART_BYTES_MAX = 120
_PARTS_MAX = 16
_FIELD = re.compile(r"\{([^{}]*)\}")
# Letters of every script stay.
_UNSAFE = re.compile(r"[^\w.~@=+,()-]+")
_RESERVED = frozenset({"", ".", "..", ".conveyor", "results.jsonl"})


class BadPattern(ConveyorError):
    """A pattern that names no field, or an unknown one."""


def check_pattern(pattern: str) -> None:
    fields = _FIELD.findall(pattern)
    unknown = [field for field in fields if field not in FIELDS]
    if unknown or "{" in _FIELD.sub("", pattern) or "}" in _FIELD.sub("", pattern):
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        raise BadPattern(f"--name {pattern!r} may have the fields {known}.")
    if not fields or fields == ["host"]:
        raise BadPattern(f"--name {pattern!r} would give all pages the same name. Add {{index}}.")


Namer = Callable[[int, Page, str], str]


def make_namer(pattern: str) -> Namer:
    """Returns the function that names a page, given its index and content type.

    Unless the pattern has {index}, the index follows the name, because two pages may have the same
    path or id.
    """
    if pattern == "{index}":
        return lambda index, _, content_type: f"{index:06d}.{extension_for(content_type)}"
    has_index = "{index}" in pattern

    def name(index: int, page: Page, content_type: str) -> str:
        target = parse_url(page.url)
        assert isinstance(target, Target)
        fields = {
            "index": f"{index:06d}",
            "host": _safe(target.host),
            "path": _safe_path(target.path_and_query),
            "id": _safe(page.id or ""),
        }
        text = _FIELD.sub(lambda match: fields[match[1]], pattern)
        parts = [_part(part) for part in text.split("/") if part not in _RESERVED]
        stem = "/".join(parts[:_PARTS_MAX]) or "page"
        extension = extension_for(content_type)
        if not has_index:
            stem = f"{stem.removesuffix(f'.{extension}')}-{index:06d}"
        return f"{stem.removesuffix(f'.{extension}')}.{extension}"

    return name


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text)


def _safe_path(path_and_query: str) -> str:
    path, _, query = path_and_query.partition("?")
    text = unquote(path).strip("/") or "index"
    if query:
        text += f"_{query}"
    return "/".join(_safe(part) for part in text.split("/") if part not in _RESERVED)


def _part(text: str) -> str:
    # A leading dot would hide the file.
    cut = text.encode(errors="replace")[:_PART_BYTES_MAX]
    return cut.decode(errors="ignore").lstrip(".") or "_"
