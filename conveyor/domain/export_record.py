"""Export: the results of a run as one file, and the manifest that verifies it
(SPEC.md 4.19).

The digest of the manifest covers one line per task, in the order of the file, so that the writer
and the verifier of a file need only one task in memory at a time.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from conveyor.domain.ids import ExportId, JobId, RunId

SCHEMA = "conveyor.export/v1"


class ExportStatus(StrEnum):
    """The state of an export."""

    PENDING = "pending"  #: The export waits for a worker.
    RUNNING = "running"  #: A worker writes the file.
    DELIVERING = "delivering"  #: The file exists and is being put to its destination.
    COMPLETED = "completed"  #: The file exists, and was put to its destination if it has one.
    FAILED = "failed"  #: The file could not be written or delivered; `error` says why.


class ExportFormat(StrEnum):
    """The format of an exported file."""

    ZIP = "zip"  #: One file per body, with `results.jsonl` and `manifest.json`.
    JSONL = "jsonl"  #: One line per task, with its body.
    CSV = "csv"  #: One row per task, without its body.
    WARC = "warc"  #: WARC 1.1, one gzip member per record.
    PARQUET = "parquet"  #: One row per task, with its body as a column.


class ExportOrder(StrEnum):
    """The order of the tasks in an exported file."""

    ID = "id"  #: By task id, which takes no memory.
    LIST = "list"  #: As the lines were submitted. It takes 16 bytes of memory per task.


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file. `tasks` counts the tasks of the run, `entries` those that ended."""

    schema: str = SCHEMA  #: `conveyor.export/v1`.
    export_id: ExportId  #: The export.
    job_id: JobId  #: Its job.
    run_id: RunId  #: Its run.
    format: ExportFormat  #: The format of the file.
    created_at: float  #: When the export was requested.
    tasks: int  #: Tasks of the run.
    entries: int  #: Tasks in the file: those that ended.
    counts: dict[str, int]  #: The same, by status.
    body_bytes: int  #: Bytes of all bodies.
    entries_sha256: str  #: Digest over one line per entry.
    order: ExportOrder = ExportOrder.ID  #: The order of the entries.


class Destination(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the file of an export is put: a presigned URL, or an object of a bucket with the keys
    of its owner. It is sealed while it is stored."""

    url: str  #: The URL for the PUT; with keys, that of the object, not signed.
    region: str | None = None  #: The region of the bucket; with keys only.
    access_key: str | None = None  #: The id of the access key.
    secret_key: str | None = None  #: The secret access key.
    session_token: str | None = None  #: The token of temporary keys.

    def __repr__(self) -> str:
        # Presigned URLs and keys are credentials, and logs contain reprs.
        return "Destination(***)"


class Export(msgspec.Struct, frozen=True):
    """The intent to export a run, and later the location of the file."""

    job_id: JobId  #: The job of the export.
    run_id: RunId  #: The run of the export.
    export_id: ExportId  #: ULID of the export.
    format: ExportFormat  #: zip, jsonl, csv, warc or parquet.
    status: ExportStatus  #: pending, running, delivering, completed or failed.
    created_at: float  #: When it was requested.
    updated_at: float  #: When the row last changed.
    expires_at: float  #: When it counts as absent.
    due_at: float  #: When an exporter has to act on it.
    total: int  #: Tasks of the run.
    done: int = 0  #: Tasks that are in the file so far.
    epoch: int = 0  #: Number of the attempt that may publish the file.
    failures: int = 0  #: Attempts that did not finish.
    error: str | None = None  #: What went wrong in the latest attempt.
    key: str | None = None  #: The blob of the file, once it is complete.
    size_bytes: int = 0  #: The length of the file.
    sha256: str | None = None  #: The digest of the file.
    manifest: Manifest | None = None  #: What the file contains.
    order: ExportOrder = ExportOrder.ID  #: id or list.
    destination: str | None = None  #: Where the file is put, without credentials.
    destination_sealed: str | None = None  #: The `Destination`, encrypted.


class ManifestDigest:
    """Counts and hashes the tasks that are passed to it, in the order of the file."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.body_bytes = 0
        self._digest = hashlib.sha256()

    @property
    def entries(self) -> int:
        return sum(self.counts.values())

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def take(self, task_id: str, status: str, size_bytes: int, sha256: str | None) -> None:
        self.counts[status] = self.counts.get(status, 0) + 1
        self.body_bytes += size_bytes
        self._digest.update(f"{task_id} {status} {size_bytes} {sha256 or '-'}\n".encode())

    def agrees_with(self, manifest: Manifest) -> bool:
        counted = (self.entries, self.counts, self.body_bytes, self.sha256)
        return counted == (
            manifest.entries,
            manifest.counts,
            manifest.body_bytes,
            manifest.entries_sha256,
        )
