"""Snapshot: every row of an engine at one moment, and what a write changed (SPEC 6.14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from conveyor.domain.changes import (
    BatchKey,
    EventKey,
    ExportKey,
    JobKey,
    NoticeKey,
    RecordKey,
    RunKey,
    StatsKey,
    TaskKey,
)
from conveyor.domain.model import Batch, Job, KeyRecord, Notice, Run, Stats, Task

Address = tuple[Any, ...]
Rows = Mapping[type, Mapping[Address, Any]]
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Lease:
    """A live lease; `job_id` is the pool that it was taken from."""

    job_id: str
    run_id: str
    expires_at: float


@dataclass(frozen=True)
class Snapshot:
    """All rows by the kind of their key; `now` is the engine's wall time, `at` virtual time.

    A task's address is (run, task), as it is in every engine.
    """

    at: float
    now: float
    rows: Rows
    leases: Sequence[Lease] = ()

    @property
    def jobs(self) -> Mapping[Address, Job]:
        return self.rows[JobKey]

    @property
    def runs(self) -> Mapping[Address, Run]:
        return self.rows[RunKey]

    @property
    def batches(self) -> Mapping[Address, Batch]:
        return self.rows[BatchKey]

    @property
    def stats(self) -> Mapping[Address, Stats]:
        return self.rows[StatsKey]

    @property
    def tasks(self) -> Mapping[Address, Task]:
        return self.rows[TaskKey]

    @property
    def records(self) -> Mapping[Address, KeyRecord]:
        return self.rows[RecordKey]

    @property
    def notices(self) -> Mapping[Address, Notice]:
        return self.rows[NoticeKey]

    @property
    def events(self) -> Mapping[Address, Any]:
        return self.rows[EventKey]

    @property
    def exports(self) -> Mapping[Address, Any]:
        return self.rows[ExportKey]

    @cached_property
    def run_by_id(self) -> dict[str, Run]:
        return {run.run_id: run for run in self.runs.values()}

    @cached_property
    def tasks_by_run(self) -> dict[str, list[Task]]:
        return _grouped((task.run_id, task) for task in self.tasks.values())

    @cached_property
    def stats_by_run(self) -> dict[str, list[Stats]]:
        return _grouped((row.run_id, row) for row in self.stats.values())

    @cached_property
    def batches_by_run(self) -> dict[str, list[Batch]]:
        return _grouped((row.run_id, row) for row in self.batches.values())

    @cached_property
    def runs_by_job(self) -> dict[str, list[Run]]:
        return _grouped((run.job_id, run) for run in self.runs.values())


def _grouped(pairs: Iterator[tuple[str, V]]) -> dict[str, list[V]]:
    groups: dict[str, list[V]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return groups


@dataclass(frozen=True, slots=True)
class Changed:
    """One row before and after; None where there was, or is, none."""

    kind: type
    address: Address
    old: Any
    new: Any


def compare(before: Snapshot, after: Snapshot) -> list[Changed]:
    """What differs, in the order of the later one. Rows that are the same object are equal."""
    found: list[Changed] = []
    for kind, table in after.rows.items():
        earlier = before.rows[kind]
        if earlier is table:
            continue
        for address, row in table.items():
            old = earlier.get(address)
            if old is not row and old != row:
                found.append(Changed(kind, address, old, row))
        found += [
            Changed(kind, address, row, None)
            for address, row in earlier.items()
            if address not in table
        ]
    return found
