"""Reads exported files as a customer would, who knows only docs/api.md, Exports.

It shares no code with the exporter, so that a mistake there is not repeated here.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import zipfile
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO, StringIO
from typing import Any, NamedTuple

READ_ERRORS = (
    EOFError,
    LookupError,
    OSError,
    ValueError,
    csv.Error,
    zipfile.BadZipFile,
    zlib.error,
)
"""The errors that readers raise for a damaged file."""


class ExportedTask(NamedTuple):
    """One task in an exported file. `sha256` is that of the body as it was read; None if there is
    no body."""

    task_id: str
    status: str
    url: str
    sha256: str | None


def read_tasks(kind: str, file: bytes) -> list[ExportedTask]:
    """Every task of the file, in its order."""
    return list(_READERS[kind](file))


def unpacked(kind: str, file: bytes) -> bytes:
    """The whole content without compression, to search it for secrets."""
    if kind == "zip":
        with zipfile.ZipFile(BytesIO(file)) as archive:
            return b"".join(archive.read(name) for name in archive.namelist())
    if kind == "parquet":
        return file + str(_rows(file)).encode()
    return gzip.decompress(file) if kind == "warc" else file


def _read_zip(file: bytes) -> Iterator[ExportedTask]:
    with zipfile.ZipFile(BytesIO(file)) as archive:
        lines = [json.loads(text) for text in archive.read("results.jsonl").splitlines()]
        files = [line["file"] for line in lines if "file" in line]
        if sorted(archive.namelist()) != sorted([*files, "manifest.json", "results.jsonl"]):
            raise ValueError("there are other files in it than it says")
        for line in lines:
            body = archive.read(line["file"]) if "file" in line else None
            yield _make_task(line, body)


def _read_lines(file: bytes) -> Iterator[ExportedTask]:
    *lines, last = (json.loads(text) for text in file.splitlines())
    if [*last] != ["manifest"]:
        raise ValueError("it does not end with its manifest")
    for line in lines:
        text, encoded = line.get("body"), line.get("body_base64")
        body = None if encoded is None else b64decode(encoded)
        yield _make_task(line, body if text is None else text.encode())


def _read_csv(file: bytes) -> Iterator[ExportedTask]:
    """CSV files contain no bodies, so the digest is the one that the file states."""
    for row in csv.DictReader(StringIO(file.decode(), newline=""), strict=True):
        yield ExportedTask(row["task_id"], row["status"], row["url"], row["sha256"] or None)


def _read_warc(file: bytes) -> Iterator[ExportedTask]:
    for fields, block in _records(gzip.decompress(file)):
        if "Conveyor-Task" in fields:
            task_id, _, status = fields["Conveyor-Task"].partition(" ")
            is_page = fields["WARC-Type"] == "response"
            body = block.partition(b"\r\n\r\n")[2] if is_page else None
            yield ExportedTask(task_id, status, fields["WARC-Target-URI"], _sha256(body))


def _read_parquet(file: bytes) -> Iterator[ExportedTask]:
    for row in _rows(file):
        yield _make_task(row, row["body"])


def _rows(file: bytes) -> list[dict[str, Any]]:
    """PyArrow is an optional dependency. Without it no Parquet export is written either."""
    from pyarrow import parquet

    with parquet.ParquetFile(BytesIO(file)) as table:
        return table.read(use_threads=False).to_pylist()  # type: ignore[no-any-return]


def _records(rest: bytes) -> Iterator[tuple[dict[str, str], bytes]]:
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        version, *lines = head.decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        length = int(fields["Content-Length"])
        block, end, rest = rest[:length], rest[length : length + 4], rest[length + 4 :]
        if version != "WARC/1.1" or end != b"\r\n\r\n":
            raise ValueError("a record is none")
        yield fields, block


def _make_task(line: Mapping[str, Any], body: bytes | None) -> ExportedTask:
    return ExportedTask(line["task_id"], line["status"], line["url"], _sha256(body))


def _sha256(body: bytes | None) -> str | None:
    return None if body is None else hashlib.sha256(body).hexdigest()


_READERS: Mapping[str, Callable[[bytes], Iterator[ExportedTask]]] = {
    "zip": _read_zip,
    "jsonl": _read_lines,
    "csv": _read_csv,
    "warc": _read_warc,
    "parquet": _read_parquet,
}
