"""Parquet: a row for each task, with its body as a column (docs/api.md, Exports).

A row group is written as soon as its bodies have so many bytes, or when it has so many rows, so
memory holds one row group. PyArrow is an extra (`conveyor[parquet]`) and is imported when a file is
begun: it takes 60 MB of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from conveyor.domain.export.entry import Entry, checked_body, line_of
from conveyor.domain.export_record import Export, Manifest

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST_KEY = "conveyor.manifest"
# A larger group compresses better and needs more memory, here and for readers.
_GROUP_BYTES = 8 * 1024 * 1024
_GROUP_ROWS = 4096
_REPEATED = ["status", "method", "content_type", "source_run_id", "error_code"]


def is_available() -> bool:
    """Whether this process can write and read Parquet."""
    return find_spec("pyarrow") is not None


class Parquet:
    suffix: ClassVar[str] = "parquet"
    media_type: ClassVar[str] = "application/vnd.apache.parquet"
    needs_bodies: ClassVar[bool] = True
    has_listing: ClassVar[bool] = False

    def __init__(self, export: Export) -> None:
        self._sink = _Sink()
        self._rows: list[dict[str, Any]] = []
        self._body_bytes = 0
        self._schema: Any = None
        self._writer: Any = None

    def begin(self) -> bytes:
        import pyarrow as pa
        from pyarrow import parquet

        # Arrow's own allocator keeps what the threads of the executor have freed: 90 MB more, at
        # the same speed.
        pa.set_memory_pool(pa.system_memory_pool())
        self._schema = _schema()
        self._writer = parquet.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=_REPEATED,
            # No minimum and maximum of bodies: they would be whole pages.
            write_statistics=[name for name in self._schema.names if name != "body"],
        )
        return self._sink.take()

    def encode(self, entries: Sequence[Entry]) -> bytes:
        for entry in entries:
            self._rows.append(_row(entry))
            self._body_bytes += entry.size_bytes
            if self._body_bytes >= _GROUP_BYTES or len(self._rows) >= _GROUP_ROWS:
                self._write_group()
        return self._sink.take()

    def list(self, entries: Sequence[Entry]) -> bytes:
        return b""

    def end(self, manifest: Manifest) -> bytes:
        self._write_group()
        self._writer.add_key_value_metadata({MANIFEST_KEY: msgspec.json.encode(manifest).decode()})
        self._writer.close()
        return self._sink.take()

    def _write_group(self) -> None:
        import pyarrow as pa

        if self._rows:
            group = pa.Table.from_pylist(self._rows, schema=self._schema)
            self._rows, self._body_bytes = [], 0
            self._writer.write_table(group, row_group_size=len(group))


class _Sink:
    """A file that keeps what was written until it is taken."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def _schema() -> pa.Schema:
    import pyarrow as pa

    text, required = pa.string(), {"task_id", "index", "url", "status", "updated_at", "method"}
    types: dict[str, pa.DataType] = {
        "task_id": text,
        "index": pa.int64(),
        "url": text,
        "status": text,
        "updated_at": pa.timestamp("s", tz="UTC"),
        "method": text,
        "external_id": text,
        "metadata": pa.map_(text, text),
        "http_status": pa.int32(),
        "content_type": text,
        "size_bytes": pa.int64(),
        "sha256": text,
        "source_run_id": text,
        "duplicate_of": text,
        "error_code": text,
        "error_detail": text,
        "body": pa.binary(),
    }
    return pa.schema(
        [pa.field(name, kind, nullable=name not in required) for name, kind in types.items()]
    )


def _row(entry: Entry) -> dict[str, Any]:
    line = line_of(entry)
    problem = line.error
    return {
        "task_id": line.task_id,
        "index": line.index,
        "url": _text(line.url),
        "status": line.status,
        "updated_at": datetime.fromtimestamp(int(entry.task.updated_at), UTC),
        "method": line.method,
        "external_id": _text(line.external_id),
        "metadata": _pairs(line.metadata),
        "http_status": line.http_status,
        "content_type": _text(line.content_type),
        "size_bytes": line.size_bytes,
        "sha256": line.sha256,
        "source_run_id": line.source_run_id,
        "duplicate_of": line.duplicate_of,
        "error_code": problem.code if problem else None,
        "error_detail": _text(problem.detail) if problem else None,
        "body": checked_body(entry) if entry.has_body else None,
    }


def _pairs(metadata: dict[str, str] | None) -> list[tuple[str | None, str | None]] | None:
    if metadata is None:
        return None
    return [(_text(name), _text(value)) for name, value in metadata.items()]


def _text(value: str | None) -> str | None:
    """The text in UTF-8. A surrogate, which UTF-8 does not have, becomes a question mark."""
    return None if value is None else value.encode("utf-8", "replace").decode()
