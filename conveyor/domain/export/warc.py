"""Warc: WARC 1.1, one gzip member a record (docs/api.md, Exports).

A page is a `response` with the status and type that were kept of the site's answer; a task without
a page is a `metadata` record with its line. The manifest is the last record.
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import b32encode
from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar

import msgspec

from conveyor.domain.export.entry import Entry, checked_body, instant, line_of
from conveyor.domain.export.export import Export, Manifest

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
        about["WARC-Payload-Digest"] = _digest(body)
        head = (
            f"HTTP/1.1 {_status_line(task.result.http_status)}\r\n"
            f"Content-Type: {entry.content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        kind = "application/http; msgtype=response"
        return self._record("response", task.task_id, task.updated_at, kind, head + body, **about)

    def _record(
        self, kind: str, name: str, at: float, content_type: str, block: bytes, **about: str
    ) -> bytes:
        fields = {
            "WARC-Type": kind,
            "WARC-Record-ID": _record_id(f"{self._export.export_id}/{name}"),
            "WARC-Date": instant(at),
            **about,
            "WARC-Block-Digest": _digest(block),
            "Content-Type": content_type,
            "Content-Length": str(len(block)),
        }
        head = "".join(f"{field}: {value}\r\n" for field, value in fields.items())
        text = f"WARC/1.1\r\n{head}\r\n".encode()
        return zlib.compress(text + block + b"\r\n\r\n", 1, wbits=31)


def _status_line(status: int) -> str:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
    return f"{status} {phrase}"


def _digest(data: bytes) -> str:
    return "sha256:" + b32encode(hashlib.sha256(data).digest()).decode()


def _record_id(text: str) -> str:
    """A UUID of our own making (version 8): the same record has the same one each time."""
    digits = hashlib.sha256(text.encode()).hexdigest()
    parts = (digits[:8], digits[8:12], "8" + digits[13:16], "a" + digits[17:20], digits[20:32])
    return f"<urn:uuid:{'-'.join(parts)}>"
