"""Entry: one task of an export file, and the line that describes it in every format."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import is_task_id
from conveyor.domain.model import Format, Problem, Task, TaskStatus
from conveyor.domain.submit.scraper_params import content_type_for, extension_for

EXPIRED = "expired"
LISTING = "results.jsonl"
MANIFEST = "manifest.json"

# Names that some systems treat as devices, and the names of the export's own entries.
_TAKEN = frozenset({"con", "prn", "aux", "nul", "results", "manifest"}) | frozenset(
    f"{port}{number}" for port in ("com", "lpt") for number in range(10)
)


class DamagedBody(ConveyorError):
    """The stored body does not match the row of its task."""


class Entry(msgspec.Struct, frozen=True):
    """A task that has ended. A successful task has its body, unless the body has expired."""

    task: Task
    format: Format
    is_expired: bool = False
    body: bytes | None = None

    @property
    def status(self) -> str:
        return EXPIRED if self.is_expired else self.task.status.value

    @property
    def has_body(self) -> bool:
        return self.task.status is TaskStatus.SUCCESSFUL and not self.is_expired

    @property
    def size_bytes(self) -> int:
        return self.task.result.size_bytes if self.has_body and self.task.result else 0

    @property
    def sha256(self) -> str | None:
        return self.task.result.sha256 if self.has_body and self.task.result else None

    @property
    def content_type(self) -> str:
        assert self.task.result is not None
        return content_type_for(self.format, self.task.result)


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of a task: a line of JSON, a row of a table, or the metadata of a body."""

    task_id: str
    index: int
    url: str
    status: str
    updated_at: str
    method: str = "GET"
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    http_status: int | None = None
    content_type: str | None = None
    size_bytes: int = 0
    sha256: str | None = None
    file: str | None = None
    source_run_id: str | None = None
    duplicate_of: str | None = None
    error: Problem | None = None
    body: str | None = None
    body_base64: str | None = None


def line_of(entry: Entry) -> Line:
    task = entry.task
    return Line(
        task_id=task.task_id,
        index=task.index,
        url=task.url,
        status=entry.status,
        updated_at=instant(task.updated_at),
        method=task.method.value,
        external_id=task.external_id,
        metadata=task.metadata,
        http_status=task.result.http_status if task.result else None,
        content_type=entry.content_type if entry.has_body else None,
        size_bytes=entry.size_bytes,
        sha256=entry.sha256,
        source_run_id=task.source_run_id,
        duplicate_of=task.duplicate_of,
        error=task.problem if task.status is TaskStatus.FAILED else None,
    )


def file_name(entry: Entry) -> str:
    """Returns a safe file name from the task id: never a path, a device, or a reserved name."""
    return f"{safe_stem(entry.task.task_id)}.{extension_for(entry.content_type)}"


def safe_stem(task_id: str) -> str:
    is_plain = is_task_id(task_id) and task_id[0] not in ".-" and task_id[-1] != "."
    if is_plain and task_id.partition(".")[0].lower() not in _TAKEN:
        return task_id
    return "x" + hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()


def checked_body(entry: Entry) -> bytes:
    assert entry.body is not None
    if hashlib.sha256(entry.body).hexdigest() != entry.sha256:
        raise DamagedBody(f"the stored body of task {entry.task.task_id} is damaged")
    return entry.body


def instant(at: float) -> str:
    """Formats a time as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(int(at), UTC).isoformat().replace("+00:00", "Z")
