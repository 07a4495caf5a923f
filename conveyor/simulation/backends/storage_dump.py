"""Lists what an engine stores beside its rows: queues, messages, coordination entries, bodies and
files (docs/simulator.md)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conveyor.engines.memory import MemoryEngine

QUEUE, MESSAGE, MARK, BODY, FILE = "queue", "message", "mark", "body", "file"
CONTROL = "control"
"""The prefix of queues that belong to no run."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One stored item. `location` is one of the constants above. A queue is named by its run, a
    message by its queue."""

    location: str
    name: str
    content: bytes = b""


def of_memory(engine: MemoryEngine) -> Iterator[StoredItem]:
    for run_id, refs in engine.queue.messages().items():
        yield StoredItem(QUEUE, run_id)
        for ref in refs:
            yield StoredItem(MESSAGE, run_id, repr(ref).encode())
    for subject, text in engine.coordinator.marks():
        yield StoredItem(MARK, subject, text.encode())
    for key, body in engine.blobs.bodies().items():
        yield StoredItem(BODY, key, body)


def of_directory(
    data_dir: Path, connection: sqlite3.Connection | None, now: float
) -> Iterator[StoredItem]:
    """The queues, messages and coordination entries of a data directory, and the bytes of every
    file in it."""
    if connection is not None:
        for (run_id,) in connection.execute("SELECT run_id FROM queues WHERE run_id IS NOT NULL"):
            yield StoredItem(QUEUE, run_id)
        refs = "SELECT run_id, job_id, task_id FROM messages JOIN queues USING (queue_id)"
        for run_id, *ref in connection.execute(refs):
            yield StoredItem(MESSAGE, run_id or "none", repr(ref).encode())
        marks = "SELECT subject, text FROM marks WHERE expires_at > ?"
        for subject, text in connection.execute(marks, (now,)):
            yield StoredItem(MARK, subject, text.encode())
    for path in sorted(data_dir.rglob("*")):
        if path.is_file():
            yield StoredItem(FILE, str(path.relative_to(data_dir)), path.read_bytes())
