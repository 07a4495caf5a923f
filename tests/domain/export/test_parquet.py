"""Parquet files are read by PyArrow and DuckDB and agree with their manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import duckdb
import msgspec
import pytest
from pyarrow import parquet

from conveyor.domain.export import parquet as parquet_module
from conveyor.domain.export.entry import DamagedBody, Entry
from conveyor.domain.export.formats import ENCODERS, missing_package
from conveyor.domain.export_record import ExportFormat, Manifest, ManifestDigest
from conveyor.sdk.downloads import BadExport, verify_export
from tests.builders import an_export
from tests.domain.export.test_formats import a_miss, a_page, an_expired, made

EXPORT = msgspec.structs.replace(an_export(), format=ExportFormat.PARQUET)
ENTRIES = [
    a_page(0, b"<p>hello</p>", metadata={"k": "v"}, external_id="a"),
    a_miss(1),
    a_page(2, bytes(range(256)), content_type="application/octet-stream"),
    an_expired(3),
    a_page(4, b"", duplicate_of="0" * 32),
    a_page(5, b"x", metadata={"bad \ud800": "text \udfff"}),
]


def saved(entries: list[Entry], folder: Path) -> tuple[Path, Manifest]:
    content, manifest = made(EXPORT, entries)
    path = folder / "results.parquet"
    path.write_bytes(content)
    return path, manifest


def test_pyarrow_and_duckdb_read_what_the_manifest_states(tmp_path: Path) -> None:
    path, manifest = saved(ENTRIES, tmp_path)

    rows = parquet.read_table(path).to_pylist()
    query = (
        f"SELECT count(*), sum(octet_length(body)), count(*) FILTER (sha256(body) = sha256) "
        f"FROM read_parquet('{path}')"
    )
    counted = duckdb.connect().execute(query).fetchall()

    assert counted == [(manifest.entries, manifest.body_bytes, manifest.counts["successful"])]
    tally = ManifestDigest()
    for row in rows:
        digest = None if row["body"] is None else hashlib.sha256(row["body"]).hexdigest()
        tally.take(row["task_id"], row["status"], len(row["body"] or b""), digest)
    assert tally.agrees_with(manifest)
    assert [row["body"] for row in rows] == [entry.body for entry in ENTRIES]
    assert dict(rows[0]["metadata"]) == {"k": "v"}
    assert rows[1]["error_code"] == "blocked"
    assert rows[4]["duplicate_of"] == "0" * 32
    assert verify_export(path) == manifest


def test_a_file_of_many_bodies_has_bounded_row_groups(tmp_path: Path) -> None:
    size = parquet_module._GROUP_BYTES // 4
    entries = [a_page(index, bytes([index]) * size) for index in range(9)]

    path, manifest = saved(entries, tmp_path)

    metadata = parquet.read_metadata(path)
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert groups == [4, 4, 1]
    assert verify_export(path) == manifest


def test_a_run_without_finished_tasks_makes_a_file_without_rows(tmp_path: Path) -> None:
    path, manifest = saved([], tmp_path)

    assert parquet.read_table(path).num_rows == 0
    assert verify_export(path) == manifest


def test_a_changed_body_is_noticed(tmp_path: Path) -> None:
    broken = msgspec.structs.replace(ENTRIES[0], body=b"another")

    with pytest.raises(DamagedBody):
        made(EXPORT, [broken])
    content, manifest = made(EXPORT, ENTRIES[:1])
    other = msgspec.structs.replace(manifest, entries_sha256="0" * 64)
    encoder = ENCODERS[ExportFormat.PARQUET](EXPORT)
    path = tmp_path / "results.parquet"
    path.write_bytes(encoder.begin() + encoder.encode(ENTRIES[:1]) + encoder.end(other))
    with pytest.raises(BadExport):
        verify_export(path)
    path.write_bytes(content[:-9])
    with pytest.raises(BadExport):
        verify_export(path)


def test_the_format_is_refused_by_name_if_pyarrow_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, _ = saved(ENTRIES, tmp_path)
    for module in ("conveyor.domain.export.parquet", "conveyor.sdk.downloads"):
        monkeypatch.setattr(f"{module}.is_available", lambda: False)

    assert missing_package(ExportFormat.PARQUET) == "conveyor[parquet]"
    assert missing_package(ExportFormat.ZIP) is None
    with pytest.raises(BadExport, match=r"pip install 'conveyor\[parquet\]'"):
        verify_export(path)
