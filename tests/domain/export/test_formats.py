"""Export formats: files of any tasks can be read by other programs and describe their own
content."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warcio.archiveiterator import ArchiveIterator

from conveyor.domain.export import formats as zip_module
from conveyor.domain.export.entry import DamagedBody, Entry, file_name, safe_stem
from conveyor.domain.export.formats import ENCODERS, record_of, safe_cell
from conveyor.domain.export_record import Export, ExportFormat, Manifest, ManifestDigest
from conveyor.domain.ids import TaskId
from conveyor.domain.model import Format, Problem, Result, TaskStatus
from conveyor.sdk.downloads import BadExport, manifest_path, verify_export
from tests.builders import a_task, an_export

PROBLEM = Problem("urn:x", "Blocked", 403, "blocked", "=cmd|' /C calc'!A0")


def a_page(index: int, body: bytes, content_type: str = "text/html", **fields: Any) -> Entry:
    result = Result("key", len(body), hashlib.sha256(body).hexdigest(), content_type, 200)
    task = a_task(index, status=TaskStatus.SUCCESSFUL, result=result, **fields)
    return Entry(task, Format.HTML, body=body)


def a_miss(index: int, **fields: Any) -> Entry:
    task = a_task(index, status=TaskStatus.FAILED, problem=PROBLEM, **fields)
    return Entry(task, Format.HTML)


def an_expired(index: int) -> Entry:
    return msgspec.structs.replace(a_page(index, b"gone"), is_expired=True, body=None)


def made(export: Export, entries: Sequence[Entry], *, at_once: int = 3) -> tuple[bytes, Manifest]:
    """The content of a file that is encoded from these entries in groups."""
    tally = ManifestDigest()
    for entry in entries:
        tally.take(entry.task.task_id, entry.status, entry.size_bytes, entry.sha256)
    manifest = Manifest(
        export_id=export.export_id,
        job_id=export.job_id,
        run_id=export.run_id,
        format=export.format,
        created_at=export.created_at,
        tasks=len(entries),
        entries=tally.entries,
        counts=tally.counts,
        body_bytes=tally.body_bytes,
        entries_sha256=tally.sha256,
    )
    encoder = ENCODERS[export.format](export)
    groups = [entries[at : at + at_once] for at in range(0, len(entries), at_once)]
    pieces = [encoder.begin(), *map(encoder.encode, groups)]
    pieces += [encoder.list(group) for group in groups if encoder.has_listing]
    return b"".join([*pieces, encoder.end(manifest)]), manifest


def save(folder: Path, export: Export, entries: Sequence[Entry]) -> Path:
    content, manifest = made(export, entries)
    path = folder / f"export.{ENCODERS[export.format].suffix}"
    path.write_bytes(content)
    if export.format is ExportFormat.CSV:
        manifest_path(path).write_bytes(msgspec.json.encode(manifest))
    return path


MIXED = [
    a_page(0, b"<p>one</p>" * 500),
    a_miss(1),
    a_page(2, bytes(range(256)), "image/png"),
    an_expired(3),
    a_page(4, b""),
    a_page(5, "ключ 🚚\x00\u2028".encode(), "text/plain; charset=utf-8"),
]


@pytest.mark.parametrize("kind", ExportFormat)
@pytest.mark.parametrize("entries", [MIXED, MIXED[:1], []], ids=["mixed", "one", "none"])
def test_a_file_agrees_with_its_manifest(
    tmp_path: Path, kind: ExportFormat, entries: list[Entry]
) -> None:
    manifest = verify_export(save(tmp_path, an_export(format=kind), entries))

    assert manifest.entries == len(entries)
    assert manifest.body_bytes == sum(entry.size_bytes for entry in entries)
    assert sum(manifest.counts.values()) == len(entries)


@pytest.mark.parametrize("kind", ExportFormat)
def test_the_same_entries_make_the_same_bytes_however_they_are_grouped(kind: ExportFormat) -> None:
    export = an_export(format=kind)
    if kind is ExportFormat.ZIP:
        assert made(export, MIXED)[0] == made(export, MIXED)[0]
    else:
        assert made(export, MIXED, at_once=1)[0] == made(export, MIXED, at_once=6)[0]


@pytest.mark.parametrize("kind", ExportFormat)
def test_a_file_that_lacks_one_task_does_not_agree_with_its_manifest(
    tmp_path: Path, kind: ExportFormat
) -> None:
    export = an_export(format=kind)
    path = save(tmp_path, export, MIXED)
    _, manifest = made(export, MIXED)
    encoder = ENCODERS[kind](export)
    bodies = encoder.begin() + encoder.encode(MIXED[1:])
    path.write_bytes(bodies + encoder.list(MIXED[1:]) + encoder.end(manifest))

    with pytest.raises(BadExport):
        verify_export(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExportFormat.ZIP, ExportFormat.JSONL, ExportFormat.WARC])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_in_a_file_is_noticed_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, kind: ExportFormat, data: st.DataObject
) -> None:
    """The damage is noticed, or every body and every count is unchanged."""
    path = save(tmp_path_factory.mktemp("damaged"), an_export(format=kind), MIXED)
    honest = verify_export(path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)

    try:
        seen = verify_export(path)
    except BadExport:
        return
    assert (seen.entries_sha256, seen.counts) == (honest.entries_sha256, honest.counts)


def test_a_body_that_differs_from_the_digest_of_its_row_is_refused() -> None:
    damaged = msgspec.structs.replace(a_page(0, b"honest"), body=b"forged")

    for kind in (ExportFormat.ZIP, ExportFormat.JSONL, ExportFormat.WARC):
        with pytest.raises(DamagedBody):
            ENCODERS[kind](an_export(format=kind)).encode([damaged])


def test_a_zip_holds_a_file_for_each_body_and_a_listing_of_all_tasks() -> None:
    content, _ = made(an_export(), MIXED)

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        bodies = {name: archive.read(name) for name in names}
        dates = {info.date_time[0] for info in archive.infolist()}
    lines = [msgspec.json.decode(line) for line in bodies["results.jsonl"].splitlines()]
    pages = [entry for entry in MIXED if entry.has_body]
    assert names == [*map(file_name, pages), "results.jsonl", "manifest.json"]
    assert [bodies[file_name(entry)] for entry in pages] == [entry.body for entry in pages]
    assert [line["task_id"] for line in lines] == [entry.task.task_id for entry in MIXED]
    assert [line.get("file") for line in lines if "file" in line] == names[:-2]
    assert dates == {2023}


@pytest.mark.slow
def test_a_zip_holds_more_files_than_16_bits_can_count() -> None:
    encoder = zip_module.ZipFile(an_export())
    pages = [a_page(index, b"x") for index in range(66_000)]

    body = encoder.encode(pages)
    listing = encoder.list(pages)
    content = body + listing + encoder.end(made(an_export(), [])[1])

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert len(archive.namelist()) == 66_002
        assert archive.read(file_name(pages[-1])) == b"x"


def test_a_zip_can_be_larger_than_four_gibibytes(tmp_path: Path) -> None:
    """The file is sparse, so that only its ends are written and read."""
    hole = 5 * 2**30
    encoder = zip_module.ZipFile(an_export())
    first, last = a_page(0, b"first"), a_page(1, b"last")
    path = tmp_path / "large.zip"
    with path.open("wb") as file:
        file.write(encoder.encode([first]))
        encoder._offset += hole
        file.seek(hole, io.SEEK_CUR)
        file.write(encoder.encode([last]) + encoder.list([first, last]))
        file.write(encoder.end(made(an_export(), [])[1]))

    with zipfile.ZipFile(path) as archive:
        assert archive.read(file_name(first)) == b"first"
        assert archive.read(file_name(last)) == b"last"
        assert len(archive.read("results.jsonl").splitlines()) == 2


def test_jsonl_lines_hold_text_as_text_and_other_bodies_in_base64() -> None:
    content, _ = made(an_export(format=ExportFormat.JSONL), MIXED)

    lines = [msgspec.json.decode(line) for line in content.splitlines()]
    assert [("body" in line, "body_base64" in line) for line in lines[:-1]] == [
        (True, False),
        (False, False),
        (False, True),
        (False, False),
        (True, False),
        (True, False),
    ]
    assert lines[1]["error"]["code"] == "blocked"
    assert lines[3]["status"] == "expired"
    assert lines[-1]["manifest"]["counts"] == {"successful": 4, "failed": 1, "expired": 1}


def test_no_cell_of_an_exported_table_is_a_formula() -> None:
    hostile = {"a": "=1+1"}
    entries = [a_miss(0, external_id="-2+3", metadata=hostile, url='https://example.com/,"\n=x')]

    content, _ = made(an_export(format=ExportFormat.CSV), entries)

    (row,) = csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True)
    assert row["error_detail"] == "'=cmd|' /C calc'!A0"
    assert row["external_id"] == "'-2+3"
    assert row["url"] == 'https://example.com/,"\n=x'
    assert row["metadata"] == '{"a":"=1+1"}'


@given(st.text())
def test_an_escaped_cell_never_begins_like_a_formula(text: str) -> None:
    cell = safe_cell(text)

    assert str(cell).endswith(text)
    assert not str(cell).lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r"))


@given(st.lists(st.text(min_size=1) | st.sampled_from(["..", "a/b", "CON", "con.x", "manifest"])))
def test_a_file_name_in_an_archive_is_plain_whatever_the_id(task_ids: list[str]) -> None:
    names = {safe_stem(task_id) for task_id in task_ids}

    assert len(names) == len(set(task_ids))
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*[A-Za-z0-9_-]|[A-Za-z0-9_]", name)
        assert name.partition(".")[0].lower() not in {"con", "nul", "com1", "results", "manifest"}


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=200), unique=True, max_size=5))
def test_an_archive_of_hostile_ids_is_unpacked_below_its_folder(
    tmp_path_factory: pytest.TempPathFactory, task_ids: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("unpacked")
    texts = [task_id.encode("utf-8", "replace").decode() for task_id in task_ids]
    entries = [a_page(at, b"page", task_id=TaskId(text)) for at, text in enumerate(set(texts))]

    content, _ = made(an_export(), entries)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(folder / "here")

    assert [path.name for path in folder.iterdir()] == ["here"]
    assert len(list((folder / "here").iterdir())) == len(entries) + 2


def test_a_web_archive_is_read_by_warcio_and_its_digests_hold() -> None:
    content, _ = made(an_export(format=ExportFormat.WARC), MIXED)

    seen = []
    for record in ArchiveIterator(io.BytesIO(content), check_digests="raise"):
        body = record.content_stream().read()
        seen.append((record.rec_type, record.rec_headers.get_header("WARC-Target-URI"), body))

    assert [kind for kind, *_ in seen] == [
        "warcinfo",
        *("response" if entry.has_body else "metadata" for entry in MIXED),
        "metadata",
    ]
    assert [url for _, url, _ in seen[1:-1]] == [entry.task.url for entry in MIXED]
    assert [body for kind, _, body in seen if kind == "response"] == [
        entry.body for entry in MIXED if entry.has_body
    ]


def test_the_address_of_a_record_is_a_uri() -> None:
    """A URI is ASCII, and a URL of a list need not be."""
    url = "https://a.example/\N{LATIN SMALL LETTER U WITH DIAERESIS}?q=%C3%BC#x"

    about = {"WARC-Target-URI": url}
    record = record_of("response", "a", "2026-01-01T00:00:00Z", "a/b", b"", about)

    assert b"WARC-Target-URI: https://a.example/%C3%BC?q=%C3%BC#x\r\n" in zlib.decompress(
        record, 31
    )


@pytest.mark.parametrize(
    "content_type", ["text/html\r\nSet-Cookie: x", "text/html\r\n\r\n<script>", "nonsense", ""]
)
def test_a_header_of_a_site_cannot_break_out_of_its_record(content_type: str) -> None:
    content, _ = made(an_export(format=ExportFormat.WARC), [a_page(0, b"body", content_type)])

    records = list(ArchiveIterator(io.BytesIO(content)))
    assert len(records) == 3
    assert b"Set-Cookie" not in content


def test_a_zip_can_hold_entries_dated_before_1980() -> None:
    content, _ = made(an_export(created_at=0.0), [a_page(0, b"x", updated_at=0.0)])

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {info.date_time[0] for info in archive.infolist()} == {1980}
