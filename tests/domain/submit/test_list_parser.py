"""Lists are read line by line in bounded memory, and chunk boundaries do not matter."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.domain.model import ListFormat, ListSpec
from conveyor.domain.submit.list_parser import Line, ListBroken, ListReader, ListTooLarge

TEXT = ListSpec(ListFormat.TEXT)
NDJSON = ListSpec(ListFormat.NDJSON)
CSV = ListSpec(ListFormat.CSV, external_id=1)
NAMED = ListSpec(ListFormat.CSV, url="link", external_id="name", header=True)

cuts = st.lists(st.integers(1, 40), max_size=20)
texts = st.text(st.sampled_from('ab,;"\r\n \t#é\x00http://'), max_size=200)


def read(spec: ListSpec, content: bytes, sizes: list[int] | None = None) -> list[Line]:
    """All lines of a list that is fed in chunks of these sizes, and then the rest at once."""
    reader, at = ListReader(spec), 0
    lines: list[Line] = []
    for size in sizes or []:
        lines += reader.feed(content[at : at + size])
        at += size
    lines += reader.feed(content[at:])
    lines += reader.end()
    return lines


def urls(spec: ListSpec, content: bytes) -> list[object]:
    return [line.draft.url for line in read(spec, content)]


def flaws(spec: ListSpec, content: bytes) -> list[str | None]:
    return [line.draft.flaw for line in read(spec, content)]


@given(text=texts, delimiter=st.sampled_from(",;\t"), quote=st.sampled_from("\"'"), sizes=cuts)
def test_csv_in_any_chunks_gives_the_records_of_the_csv_module(
    text: str, delimiter: str, quote: str, sizes: list[int]
) -> None:
    spec = ListSpec(ListFormat.CSV, external_id=1, delimiter=delimiter, quote=quote)
    source = io.StringIO(text, newline="")
    records = [row for row in csv.reader(source, delimiter=delimiter, quotechar=quote) if row]
    cells = [[cell.strip() for cell in row] for row in records]

    lines = read(spec, text.encode(), sizes)

    assert [line.draft.url for line in lines] == [row[0] for row in cells]
    assert [line.draft.external_id for line in lines] == [
        (row[1] if len(row) > 1 else None) or None for row in cells
    ]


@given(
    content=st.one_of(texts.map(str.encode), st.binary(max_size=200)),
    spec=st.sampled_from([TEXT, NDJSON, CSV]),
    sizes=cuts,
    zipped=st.booleans(),
)
def test_chunk_boundaries_do_not_change_the_lines(
    content: bytes, spec: ListSpec, sizes: list[int], zipped: bool
) -> None:
    if content.startswith(b"\x1f\x8b"):
        content = b" " + content
    whole = read(spec, content)

    assert read(spec, gzip.compress(content) if zipped else content, sizes) == whole
    assert read(spec, content, [1] * len(content)) == whole


@given(
    rows=st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.text(max_size=20)), min_size=1, max_size=20
    )
)
def test_what_the_csv_module_writes_is_read_back(rows: list[tuple[str, str]]) -> None:
    rows = [(url.strip() or "x", name.strip()) for url, name in rows]
    rows = [(_storable(url), _storable(name)) for url, name in rows]
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("name", "link"), *((name, url) for url, name in rows)])

    lines = read(NAMED, file.getvalue().encode())

    assert [(line.draft.url, line.draft.external_id or "") for line in lines] == rows


def _storable(text: str) -> str:
    return text.encode(errors="replace").decode()


@given(content=texts, spec=st.sampled_from([TEXT, CSV]), at=st.integers(0, 50))
def test_a_second_reading_in_other_chunks_gives_the_same_remaining_lines(
    content: str, spec: ListSpec, at: int
) -> None:
    lines = read(spec, content.encode())

    assert read(spec, content.encode(), [3, 5, 7])[at:] == lines[at:]


def test_a_text_list_has_a_url_a_line_and_skips_blanks_comments_and_a_byte_order_mark() -> None:
    content = b"\xef\xbb\xbfhttps://a.b/1\r\n\r\n# a comment\n  https://a.b/2 \rhttps://a.b/3"

    lines = read(TEXT, content)

    assert [(line.number, line.draft.url) for line in lines] == [
        (1, "https://a.b/1"),
        (4, "https://a.b/2"),
        (5, "https://a.b/3"),
    ]


def test_csv_columns_are_found_by_their_names_in_the_header() -> None:
    content = b'\xef\xbb\xbf"name", link ,more\nn1,https://a.b/1,x\n\n,https://a.b/2\nn3\n'

    lines = read(NAMED, content)

    assert [(line.number, line.draft.url, line.draft.external_id) for line in lines] == [
        (2, "https://a.b/1", "n1"),
        (4, "https://a.b/2", None),
        (5, None, "n3"),
    ]


def test_a_csv_header_without_the_named_column_makes_the_list_invalid() -> None:
    with pytest.raises(ListBroken, match="no column named 'link'"):
        read(NAMED, b"name,url\nn1,https://a.b/1\n")


def test_a_csv_header_that_cannot_be_read_makes_the_list_invalid() -> None:
    with pytest.raises(ListBroken, match="header"):
        read(NAMED, b"name,\xff\nn1,https://a.b/1\n")


def test_ndjson_lines_are_tasks_or_bare_urls_and_invalid_lines_keep_their_index() -> None:
    task = {"url": "https://a.b/1", "method": "POST", "body": {"a": 1}, "metadata": {"k": "v"}}
    content = [json.dumps(task), "", '"https://a.b/2"', "{", '{"uri": 1}', "7", '{"url": "x"}']

    lines = read(NDJSON, "\n".join(content).encode())

    assert [line.draft.flaw for line in lines] == [None, None, *["malformed_line"] * 3, None]
    assert [line.number for line in lines] == [1, 3, 4, 5, 6, 7]
    first = lines[0].draft
    assert (first.url, first.method, first.metadata) == ("https://a.b/1", "POST", {"k": "v"})
    assert bytes(first.body or b"") == b'{"a": 1}'


@pytest.mark.parametrize("spec", [TEXT, CSV], ids=["text", "csv"])
def test_bytes_that_are_not_utf_8_invalidate_only_their_own_line(spec: ListSpec) -> None:
    content = b"https://a.b/1\nhttps://a.b/\xff\nhttps://a.b/3\n"

    assert flaws(spec, content) == [None, "invalid_encoding", None]


def test_an_ndjson_line_with_a_repeated_key_is_invalid() -> None:
    content = (
        b'{"url":"http://a/","url":"http://b/"}\n{"url":"http://c/","metadata":{"x":"1","x":"2"}}'
    )

    lines = read(NDJSON, content)

    assert [line.draft.flaw for line in lines] == ["malformed_line", "malformed_line"]


@pytest.mark.parametrize("spec", [TEXT, NDJSON, CSV], ids=["text", "ndjson", "csv"])
@pytest.mark.parametrize("more", [1, 2, 3, 100_000])
def test_a_line_that_is_too_long_invalidates_only_itself(spec: ListSpec, more: int) -> None:
    long = b"x" * (limits.LIST_LINE_BYTES_MAX + more)
    content = b'"https://a.b/1"\r\n' + long + b'\r\n"https://a.b/3"\r\n' + long

    whole = flaws(spec, content)

    assert whole == [None, "line_too_long", None, "line_too_long"]
    assert [line.draft.flaw for line in read(spec, content, [4096] * 90)] == whole


def test_a_quote_that_is_never_closed_invalidates_one_record_of_bounded_length() -> None:
    row = b"https://a.b/1,x\n"
    content = b'"open\n' + row * (2 * limits.LIST_LINE_BYTES_MAX // len(row))

    problems = flaws(CSV, content)

    assert problems[0] == "line_too_long"
    assert set(problems[1:]) == {None}
    assert len(problems) > limits.LIST_LINE_BYTES_MAX // len(row)


def test_a_list_with_more_lines_than_allowed_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASKS_MAX", 3)

    assert len(urls(TEXT, b"a\nb\n\nc\n")) == 3
    with pytest.raises(ListTooLarge, match="more than 3 lines"):
        urls(TEXT, b"a\nb\nc\nd")


def test_concatenated_gzip_members_are_read_and_trailing_zeros_ignored() -> None:
    content = gzip.compress(b"https://a.b/1\nhttps:") + gzip.compress(b"//a.b/2\n") + b"\0" * 9

    assert urls(TEXT, content) == ["https://a.b/1", "https://a.b/2"]
    assert read(TEXT, content, [1] * len(content)) == read(TEXT, content)


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"https://a.b/1\n")[:-3],
        gzip.compress(b"https://a.b/1\n") + b"garbage",
        b"\x1f\x8bnothing of the kind",
    ],
    ids=["truncated", "trailing", "damaged"],
)
def test_truncated_or_damaged_gzip_makes_the_list_invalid(content: bytes) -> None:
    with pytest.raises(ListBroken, match="gzip"):
        read(TEXT, content)


def deflate_of(block: bytes, count: int) -> bytes:
    """One gzip member of empty blocks."""
    return bytes.fromhex("1f8b0800000000000003") + block * count


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"") * 20_000,
        gzip.compress(b"\n") * 20_000,
        deflate_of(b"\0\0\0\xff\xff", 80_000),
        gzip.compress(b"https://a.b/1\n") + bytes(400_000),
    ],
    ids=["empty members", "members of a line", "empty blocks", "padding"],
)
def test_gzip_that_inflates_to_hardly_any_lines_makes_the_list_invalid(content: bytes) -> None:
    sizes = [16_384] * (len(content) // 16_384 + 1)

    with pytest.raises(ListBroken, match=r"too many members|hardly anything"):
        read(TEXT, content, sizes)


def test_blank_lines_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conveyor.domain.submit.list_parser._RAW_LINES_MAX", 1_000)

    with pytest.raises(ListTooLarge, match="blank ones too"):
        read(TEXT, gzip.compress(b"\n" * 1_001))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [TEXT, NDJSON, CSV], ids=["text", "ndjson", "csv"])
def test_a_decompression_bomb_is_too_large_and_is_never_held_in_memory(
    spec: ListSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB inflate to one line of 64 MiB, more than may be held at any time."""
    monkeypatch.setattr(limits, "LIST_BYTES_MAX", 48 * 1024 * 1024)
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    content = b"".join(bomb.compress(b"a" * 1024 * 1024) for _ in range(64)) + bomb.flush()

    tracemalloc.start()
    with pytest.raises(ListTooLarge, match="bytes"):
        read(spec, content)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 2 * 1024 * 1024


@given(content=texts, sizes=cuts)
def test_the_quick_line_count_is_never_below_the_number_of_lines(
    content: str, sizes: list[int]
) -> None:
    body, at, ends = content.encode(), 0, 0
    reader = ListReader(TEXT)
    for size in [*sizes, len(body)]:
        ends += reader.count_ends(body[at : at + size])
        at += size

    assert ends + 1 >= len(read(TEXT, body))
