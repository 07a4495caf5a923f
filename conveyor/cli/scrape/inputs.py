"""Reads lists of pages: URLs, text, CSV and NDJSON, plain or gzip, from files or standard input
(docs/scrape.md, Input)."""

from __future__ import annotations

import csv
import errno
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from conveyor.cli.scrape.pages import Page, request_key
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Column, ListFormat, ListSpec, Method
from conveyor.domain.submit.admission import Refusal, TaskDraft, check_task
from conveyor.domain.submit.list_parser import Line, ListReader, ListUnusable
from conveyor.domain.submit.scraper_params import GatewaySupport
from conveyor.domain.submit.target import BadUrl, Target, TargetPolicy, parse_url

PIECE_BYTES = 256 * 1024
ID_CHARS_MAX = 256
PROGRESS_LINES = 20_000
_SUFFIXES = {
    ".csv": ListFormat.CSV,
    ".tsv": ListFormat.CSV,
    ".ndjson": ListFormat.NDJSON,
    ".jsonl": ListFormat.NDJSON,
    ".txt": ListFormat.TEXT,
}
# Names of a CSV column that has the URLs, if the caller names none.
_URL_COLUMNS = ("url", "urls", "link", "href", "address", "website")
_PRIVATE_HINT = (
    "CONVEYOR_ALLOW_PRIVATE_TARGETS=1 allows loopback and private addresses, and all ports."
)
_GZIP = b"\x1f\x8b"
# The methods of a job and of a gateway, and those of a direct fetch.
GATEWAY_METHODS = tuple(Method)
DIRECT_METHODS = (*GATEWAY_METHODS, "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")
BODYLESS_METHODS = frozenset({"GET", "HEAD"})


class BadList(ConveyorError):
    """A list that cannot be read. The message names the file and what can be done."""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How the lists are read. Columns are names, or numbers from 1."""

    format: ListFormat | None = None
    url_column: str | None = None
    id_column: str | None = None
    delimiter: str | None = None
    method: str | None = None
    body: bytes | None = None
    content_type: str | None = None
    methods: Collection[str] = GATEWAY_METHODS


@dataclass(slots=True)
class PageList:
    """The pages in list order, and the host of each."""

    pages: list[Page] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)

    def add(self, page: Page, host: str) -> None:
        self.pages.append(page)
        self.hosts.append(host)


def hosts_of(pages: Sequence[Page]) -> list[str]:
    """Returns the hosts of pages that were checked before."""
    names: list[str] = []
    for page in pages:
        target = parse_url(page.url)
        names.append(target.host if isinstance(target, Target) else "")
    return names


def read_pages(
    sources: Sequence[str],
    options: InputOptions,
    targets: TargetPolicy | None,
    support: GatewaySupport,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PageList:
    """Reads all sources in order. A bad line becomes a page with a flaw."""
    page_list = PageList()
    reader = _Lines(options, targets, support)
    for source in sources:
        drafts = _drafts(source, options)
        for line in drafts:
            page, host = reader.page_from(line)
            page_list.add(page, host)
            if len(page_list.pages) % PROGRESS_LINES == 0:
                on_progress(len(page_list.pages))
    return page_list


class _Lines:
    """Checks lines. Most have only a URL, which takes the short path."""

    def __init__(
        self, options: InputOptions, targets: TargetPolicy | None, support: GatewaySupport
    ) -> None:
        self._options = options
        self._targets = targets
        self._support = support
        self._allowed: set[tuple[str, int]] = set()

    def page_from(self, line: Line) -> tuple[Page, str]:
        number, draft = line
        if draft.flaw is None and draft.params is None and draft.method is None:
            return self._plain(number, draft)
        try:
            return self._checked(number, draft)
        except Refusal as refusal:
            flaw = refusal.reason if refusal.value is None else f"{refusal.reason}: {refusal.value}"
            url = draft.url if isinstance(draft.url, str) else ""
            return Page(url, line=number, flaw=flaw), ""

    def _plain(self, number: int, draft: TaskDraft) -> tuple[Page, str]:
        url = draft.url if isinstance(draft.url, str) else ""
        options = self._options
        target = parse_url(url)
        if isinstance(target, BadUrl):
            return Page(url, line=number, flaw=f"{target.reason.value}: {target.detail}"), ""
        site = (target.host, target.port)
        if self._targets is not None and site not in self._allowed:
            refusal = self._targets.forbids_target(target)
            if refusal is not None:
                return Page(url, line=number, flaw=f"forbidden_target: {refusal}"), ""
            self._allowed.add(site)
        host = sys.intern(target.host)
        given_id = draft.external_id
        if options.method is None and given_id is None:
            return Page(url, line=number), host
        page = Page(
            url,
            id=None if given_id is None else str(given_id)[:ID_CHARS_MAX],
            method=options.method or "GET",
            body=options.body,
            content_type=options.content_type,
            line=number,
        )
        return page, host

    def _checked(self, number: int, draft: TaskDraft) -> tuple[Page, str]:
        options = self._options
        given_id = draft.external_id
        method = self._method(draft)
        # Jobs know only GET and POST. The other methods differ in whether they may have a body.
        known = Method.GET if method in BODYLESS_METHODS else Method.POST
        draft = msgspec.structs.replace(draft, external_id=None, method=known)
        spec, secrets = check_task(number, draft, {}, self._targets, self._support)
        target = parse_url(spec.url)
        assert isinstance(target, Target)
        body = secrets.body if secrets else None
        content_type = secrets.content_type if secrets else None
        if body is None and method not in BODYLESS_METHODS:
            body, content_type = options.body, options.content_type
        page = Page(
            spec.url,
            id=None if given_id is None else str(given_id)[:ID_CHARS_MAX],
            method=method,
            headers=secrets.headers if secrets else None,
            body=body,
            content_type=content_type,
            params=spec.params,
            line=number,
        )
        return page, sys.intern(target.host)

    def _method(self, draft: TaskDraft) -> str:
        name = self._options.method if draft.method is None else draft.method
        method = "GET" if name is None else str(name).upper()
        if method not in self._options.methods:
            raise Refusal("unsupported_method", str(name)[:20])
        return method


def _drafts(source: str, options: InputOptions) -> Iterator[Line]:
    if "://" in source:
        yield Line(0, TaskDraft(url=source))
        return
    try:
        with sys.stdin.buffer if source == "-" else Path(source).open("rb") as file:
            yield from _lines_in(file, source, options)
    except OSError as error:
        hint = " A URL begins with http:// or https://." if error.errno == errno.ENOENT else ""
        raise BadList(f"Cannot read {source}: {error.strerror}.{hint}") from None
    except ListUnusable as error:
        raise BadList(f"{source}: {error}") from None


def _lines_in(file: BinaryIO, source: str, options: InputOptions) -> Iterator[Line]:
    piece = file.read(PIECE_BYTES)
    first = _first_line(piece)
    list_format = options.format or _format_of(source, first)
    if first.startswith("[") and list_format is not ListFormat.CSV:
        raise BadList(f"{source} is a JSON array. Give one object a line: jq -c '.[]' {source}")
    if list_format is ListFormat.CSV:
        reader = ListReader(_csv_spec(source, first, options))
    else:
        # A line of NDJSON is a line of text, too.
        reader = ListReader(ListSpec(ListFormat.TEXT))
    convert = _from_json if list_format is ListFormat.NDJSON else _from_text
    while piece:
        for line in reader.feed(piece):
            yield convert(line, source)
        piece = file.read(PIECE_BYTES)
    for line in reader.end():
        yield convert(line, source)


def _first_line(piece: bytes) -> str:
    if piece.startswith(_GZIP):
        try:
            piece = zlib.decompressobj(31).decompress(piece, PIECE_BYTES)
        except zlib.error:
            return ""
    lines = piece.decode("utf-8-sig", errors="replace").splitlines()
    return next((line.strip() for line in lines if line.strip() and line[0] != "#"), "")


def _format_of(source: str, first: str) -> ListFormat:
    suffixes = [suffix for suffix in Path(source).suffixes if suffix != ".gz"]
    known = _SUFFIXES.get(suffixes[-1].lower()) if suffixes else None
    if known is not None:
        return known
    if first.startswith("{"):
        return ListFormat.NDJSON
    names = _cells_of(first, _guessed_delimiter(first))
    is_header = any(name.lower() in _URL_COLUMNS for name in names)
    return ListFormat.CSV if is_header else ListFormat.TEXT


def _guessed_delimiter(first: str) -> str:
    return max(",;\t|", key=lambda sign: (first.count(sign), sign == ","))


def _cells_of(line: str, delimiter: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]


def _csv_spec(source: str, first: str, options: InputOptions) -> ListSpec:
    delimiter = options.delimiter or _guessed_delimiter(first)
    names = _cells_of(first, delimiter)
    has_header = not any("://" in cell for cell in names)
    for column in (options.url_column, options.id_column):
        if isinstance(place := _column(column), int) and place >= len(names):
            raise BadList(f"{source} has {len(names)} columns, and no column {column}.")
    url = _column(options.url_column)
    if url is None:
        url = _guessed_column(names, has_header=has_header, source=source)
    return ListSpec(
        ListFormat.CSV,
        url=url,
        external_id=_column(options.id_column),
        header=has_header,
        delimiter=delimiter,
    )


def _column(name: str | None) -> Column | None:
    if name is None:
        return None
    return int(name) - 1 if name.isdigit() and int(name) > 0 else name


def _guessed_column(names: Sequence[str], *, has_header: bool, source: str) -> Column:
    if not has_header:
        return next(place for place, cell in enumerate(names) if "://" in cell)
    for name in names:
        if name.lower() in _URL_COLUMNS:
            return name
    if len(names) == 1:
        return 0
    raise BadList(
        f"{source}: no column is named url. Name the column with --url-column; there are: "
        f"{', '.join(names)}."
    )


def _from_text(line: Line, source: str) -> Line:
    if line.draft.flaw == "invalid_encoding":
        raise BadList(f"{source} is not UTF-8 text. Give a file with one URL a line.")
    return line


class _JsonPage(msgspec.Struct, forbid_unknown_fields=True):
    """A line of NDJSON. The names of the API are accepted as well."""

    url: str
    id: str | int | None = None
    external_id: str | int | None = None
    method: str | None = None
    headers: dict[str, str] | None = None
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    params: dict[str, Any] | None = None
    zenrows_params: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


_json_page = msgspec.json.Decoder(_JsonPage | str)


def _from_json(line: Line, source: str) -> Line:
    number, draft = _from_text(line, source)
    if draft.flaw is not None:
        return line
    try:
        page = _json_page.decode(str(draft.url))
    except (msgspec.DecodeError, RecursionError) as error:
        return Line(number, TaskDraft(url=None, flaw=f"malformed_line: {error}"))
    if isinstance(page, str):
        return Line(number, TaskDraft(url=page))
    params = {**(page.zenrows_params or {}), **(page.params or {})}
    if page.headers:
        params["custom_headers"] = page.headers
    has_body = page.body is not msgspec.UNSET
    return Line(
        number,
        TaskDraft(
            url=page.url,
            external_id=page.id if page.id is not None else page.external_id,
            method=page.method or ("POST" if has_body else None),
            body=page.body if isinstance(page.body, msgspec.Raw) else None,
            params=params or None,
        ),
    )


def read_body(text: str | None) -> bytes | None:
    """Returns the body of every page: a text, or the content of @FILE."""
    if text is None or not text.startswith("@"):
        return None if text is None else text.encode()
    try:
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise BadList(f"Cannot read {text[1:]}: {error.strerror}.") from None


def content_type_of(body: bytes) -> str:
    is_json = body.lstrip()[:1] in {b"{", b"["}
    return "application/json" if is_json else "application/x-www-form-urlencoded"


def describe_flaws(flawed: Sequence[Page], shown_max: int) -> list[str]:
    """Returns a line for each page that cannot be fetched, and what may help."""
    lines = [
        f"  {f'line {page.line}' if page.line else page.url}: {page.flaw}"
        for page in flawed[:shown_max]
    ]
    if len(flawed) > shown_max:
        lines.append(f"  ... and {len(flawed) - shown_max:,} more")
    if any(str(page.flaw) == "malformed_url: no scheme" for page in flawed):
        lines.append("A URL begins with http:// or https://.")
    if any(str(page.flaw).startswith("forbidden_target") for page in flawed):
        lines.append(_PRIVATE_HINT)
    return lines


def find_duplicates(pages: Sequence[Page]) -> dict[int, int]:
    """Returns the positions of repeated requests, and that of the first of each."""
    first: dict[object, int] = {}
    repeated: dict[int, int] = {}
    for index, page in enumerate(pages):
        if page.flaw is not None:
            continue
        earlier = first.setdefault(request_key(page), index)
        if earlier != index:
            repeated[index] = earlier
    return repeated
