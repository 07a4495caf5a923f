"""Export: a run's results as one file, what is told of it, and how that can be checked (SPEC 5.7).

The manifest's digest runs over one line per task, in id order, so that neither who writes a file
nor who checks it ever holds more than one task of it.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from conveyor.domain.ids import ExportId, JobId, RunId

SCHEMA = "conveyor.export/v1"


class ExportStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class ExportFormat(StrEnum):
    ZIP = "zip"
    JSONL = "jsonl"
    CSV = "csv"
    WARC = "warc"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds. `tasks` are those of the run; `entries` the ones that had ended."""

    schema: str = SCHEMA
    export_id: ExportId
    job_id: JobId
    run_id: RunId
    format: ExportFormat
    created_at: float
    tasks: int
    entries: int
    counts: dict[str, int]
    body_bytes: int
    entries_sha256: str


class Export(msgspec.Struct, frozen=True):
    """The intent to make a file of a run's results, and then where the file lies."""

    job_id: JobId
    run_id: RunId
    export_id: ExportId
    format: ExportFormat
    status: ExportStatus
    created_at: float
    updated_at: float
    expires_at: float
    due_at: float
    total: int
    done: int = 0
    epoch: int = 0
    failures: int = 0
    error: str | None = None
    key: str | None = None
    size_bytes: int = 0
    sha256: str | None = None
    manifest: Manifest | None = None


class Tally:
    """Counts and digests tasks as they pass by, in id order."""

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
