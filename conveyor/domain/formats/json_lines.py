"""JsonLines: a line of JSON for each task, its body included; the last line is the manifest."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from conveyor.domain.export import Export, Manifest
from conveyor.domain.formats.entry import Entry, Line, checked_body, line_of


class LastLine(msgspec.Struct, frozen=True):
    manifest: Manifest


class JsonLines:
    suffix: ClassVar[str] = "jsonl"
    media_type: ClassVar[str] = "application/x-ndjson"
    needs_bodies: ClassVar[bool] = True
    has_listing: ClassVar[bool] = False

    def __init__(self, export: Export) -> None:
        self._encoder = msgspec.json.Encoder()

    def begin(self) -> bytes:
        return b""

    def encode(self, entries: Sequence[Entry]) -> bytes:
        return self._encoder.encode_lines([_with_body(entry) for entry in entries])

    def list(self, entries: Sequence[Entry]) -> bytes:
        return b""

    def end(self, manifest: Manifest) -> bytes:
        return self._encoder.encode_lines([LastLine(manifest)])


def _with_body(entry: Entry) -> Line:
    line = line_of(entry)
    if not entry.has_body:
        return line
    body = checked_body(entry)
    try:
        return msgspec.structs.replace(line, body=body.decode())
    except UnicodeDecodeError:
        return msgspec.structs.replace(line, body_base64=b64encode(body).decode())
