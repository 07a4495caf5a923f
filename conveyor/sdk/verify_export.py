"""Checks an exported file of any format against its manifest: every body and every count."""

from __future__ import annotations

import csv
import gzip
import hashlib
import struct
import zipfile
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from conveyor.domain.export.entry import LISTING, MANIFEST, Line
from conveyor.domain.export.export import ExportFormat, Manifest, ManifestDigest
from conveyor.domain.export.formats import TASK_FIELD, LastLine
from conveyor.sdk.errors import SdkError

_PIECE_BYTES = 65_536
# The errors that the readers raise for damaged files.
_DAMAGE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    ValueError,
    csv.Error,
    msgspec.MsgspecError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class BadExport(SdkError):
    """The file does not match its manifest, or is not an export."""


def manifest_path(path: Path) -> Path:
    """The path of the separate manifest, for formats that cannot contain one."""
    return path.with_name(f"{path.name}.{MANIFEST}")


def verify_export(path: Path) -> Manifest:
    """Returns the manifest of a valid file. Raises BadExport, or OSError if it is not readable."""
    with path.open("rb") as file:
        start = file.read(2)
    check = _CHECKS.get(start, _check_text)
    try:
        manifest, tally = check(path)
    except _DAMAGE as error:
        raise BadExport(f"{path} cannot be read as an export: {error}") from error
    if not tally.agrees_with(manifest):
        raise BadExport(f"{path} is not what its manifest says.")
    return manifest


_Checked = tuple[Manifest, ManifestDigest]


def _check_zip(path: Path) -> _Checked:
    tally = ManifestDigest()
    with zipfile.ZipFile(path) as archive:
        manifest = msgspec.json.decode(archive.read(MANIFEST), type=Manifest)
        decoder = msgspec.json.Decoder(Line)
        with archive.open(LISTING) as listing:
            for text in listing:
                line = decoder.decode(text)
                sha256 = None
                if line.file is not None:
                    with archive.open(line.file) as body:
                        sha256 = _sha256_of(body)
                tally.take(line.task_id, line.status, line.size_bytes, sha256)
        files = len(archive.infolist()) - 2
    if files != manifest.counts.get("successful", 0):
        raise ValueError(f"it holds {files} bodies")
    return manifest, tally


def _check_text(path: Path) -> _Checked:
    if path.suffix == f".{ExportFormat.CSV}" or manifest_path(path).exists():
        return _check_csv(path)
    return _check_jsonl(path)


def _check_jsonl(path: Path) -> _Checked:
    tally = ManifestDigest()
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        before = b""
        for text in file:
            if before:
                _take_line(tally, decoder.decode(before))
            before = text
    return msgspec.json.decode(before, type=LastLine).manifest, tally


def _take_line(tally: ManifestDigest, line: Line) -> None:
    body = b64decode(line.body_base64) if line.body_base64 is not None else None
    if line.body is not None:
        body = line.body.encode()
    sha256 = None if body is None else hashlib.sha256(body).hexdigest()
    tally.take(line.task_id, line.status, 0 if body is None else len(body), sha256)


def _check_csv(path: Path) -> _Checked:
    """Checks the rows of a CSV file, which contains no bodies."""
    manifest = msgspec.json.decode(manifest_path(path).read_bytes(), type=Manifest)
    tally = ManifestDigest()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, strict=True):
            size_bytes = int(row["size_bytes"])
            tally.take(row["task_id"], row["status"], size_bytes, row["sha256"] or None)
    return manifest, tally


def _check_warc(path: Path) -> _Checked:
    tally = ManifestDigest()
    block = b""
    with gzip.open(path) as file:
        for fields, block in _records(file):
            if TASK_FIELD in fields:
                task_id, _, status = fields[TASK_FIELD].partition(" ")
                is_page = fields["WARC-Type"] == "response"
                body = block.partition(b"\r\n\r\n")[2] if is_page else b""
                sha256 = hashlib.sha256(body).hexdigest() if is_page else None
                tally.take(task_id, status, len(body), sha256)
    return msgspec.json.decode(block, type=Manifest), tally


def _records(file: gzip.GzipFile) -> Iterator[tuple[dict[str, str], bytes]]:
    while version := file.readline():
        if version != b"WARC/1.1\r\n":
            raise ValueError("a record does not begin as one")
        fields: dict[str, str] = {}
        while (text := file.readline()) not in (b"\r\n", b""):
            name, _, value = text.decode().partition(": ")
            fields[name] = value.rstrip("\r\n")
        block = file.read(int(fields["Content-Length"]))
        if file.read(4) != b"\r\n\r\n":
            raise ValueError("a record does not end as one")
        yield fields, block


def _sha256_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


_CHECKS: dict[bytes, Callable[[Path], _Checked]] = {b"PK": _check_zip, b"\x1f\x8b": _check_warc}
