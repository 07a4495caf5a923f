"""Snapshots: all rows of an engine at one instant, and the differences between two of them
(docs/simulator.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
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
from conveyor.domain.lifecycle import RUN_LIVE, TASK_UNFINISHED
from conveyor.domain.model import Batch, IdempotencyRecord, Job, Notice, Run, ShardCounters, Task

Address = tuple[Any, ...]
Rows = Mapping[type, Mapping[Address, Any]]
V = TypeVar("V")
Groups = Mapping[str, Sequence[V]]


@dataclass(frozen=True, slots=True)
class Lease:
    """A live lease. `job_id` is the pool that it was taken from, `name` the name that its holder
    uses, empty where the engine does not show it. `is_capped` is False for a pool whose leases were
    restored after an outage, which ignores the cap."""

    job_id: str
    run_id: str
    expires_at: float
    name: str = ""
    is_capped: bool = True


@dataclass(frozen=True)
class Snapshot:
    """All rows, by the type of their key. `now` is the wall time of the engine, `at` the virtual
    time.

    The address of a task is (run id, task id) on every engine. `written` has the addresses that may
    differ from the previous snapshot, if the engine knows them.
    """

    at: float
    now: float
    rows: Rows
    leases: Sequence[Lease] = ()
    written: Mapping[type, Collection[Address]] | None = None

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
    def stats(self) -> Mapping[Address, ShardCounters]:
        return self.rows[StatsKey]

    @property
    def tasks(self) -> Mapping[Address, Task]:
        return self.rows[TaskKey]

    @property
    def records(self) -> Mapping[Address, IdempotencyRecord]:
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
    def tasks_by_run(self) -> Groups[Task]:
        return _grouped(self.tasks.values(), _run_of)

    @cached_property
    def stats_by_run(self) -> Groups[ShardCounters]:
        return _grouped(self.stats.values(), _run_of)

    @cached_property
    def batches_by_run(self) -> Groups[Batch]:
        return _grouped(self.batches.values(), _run_of)

    @cached_property
    def runs_by_job(self) -> Groups[Run]:
        return _grouped(self.runs.values(), _job_of)

    def update_groups(self, before: Snapshot, written: Sequence[RowChange]) -> None:
        """Takes over the groupings of the previous snapshot and updates the groups that changed.
        Two successive snapshots differ in few rows, so this is much cheaper than grouping anew."""
        for name, (kind, group_of) in _GROUPINGS.items():
            if (groups := before.__dict__.get(name)) is not None:
                own = [change for change in written if change.kind is kind]
                self.__dict__[name] = _regrouped(groups, own, group_of) if own else groups


def idle_runs(snapshot: Snapshot, queue_depths: Mapping[str, int]) -> list[str]:
    """The live runs in which nothing can happen without the sweeper: some tasks have not ended, no
    list is being ingested, no message is queued, and no worker has a claim."""
    idle = []
    for run in snapshot.runs.values():
        is_asked_for = run.open_batches > 0 or run.stop_requested_at is not None
        if run.status not in RUN_LIVE or is_asked_for or queue_depths.get(run.run_id):
            continue
        tasks = snapshot.tasks_by_run.get(run.run_id, [])
        left = [task for task in tasks if task.status in TASK_UNFINISHED]
        if left and all(task.claim_until < snapshot.now for task in left):
            idle.append(str(run.run_id))
    return idle


def _run_of(row: Task | ShardCounters | Batch) -> str:
    return row.run_id


def _job_of(run: Run) -> str:
    return run.job_id


_GROUPINGS: Mapping[str, tuple[type, Callable[[Any], str]]] = {
    "tasks_by_run": (TaskKey, _run_of),
    "stats_by_run": (StatsKey, _run_of),
    "batches_by_run": (BatchKey, _run_of),
    "runs_by_job": (RunKey, _job_of),
}


def _grouped(rows: Iterable[V], group_of: Callable[[V], str]) -> Groups[V]:
    groups: dict[str, list[V]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    return groups


def _regrouped(
    groups: Groups[V], changes: Sequence[RowChange], group_of: Callable[[V], str]
) -> Groups[V]:
    added = _grouped((change.new for change in changes if change.new is not None), group_of)
    gone = _grouped((change.old for change in changes if change.old is not None), group_of)
    changed = dict(groups)
    for name in {**gone, **added}:
        old = {id(row) for row in gone.get(name, ())}
        unchanged = [row for row in groups.get(name, ()) if id(row) not in old]
        changed[name] = [*unchanged, *added.get(name, ())]
    return changed


@dataclass(frozen=True, slots=True)
class RowChange:
    """One row before and after. `old` is None for a new row, `new` for a removed one."""

    kind: type
    address: Address
    old: Any
    new: Any


def compare(before: Snapshot, after: Snapshot) -> list[RowChange]:
    """Returns the rows that were written between two snapshots, in the order of `after`, including
    rewritten rows with equal values."""
    if after.written is not None:
        return [
            RowChange(kind, address, old, new)
            for kind, addresses in after.written.items()
            for address in addresses
            if (old := before.rows[kind].get(address)) is not (new := after.rows[kind].get(address))
        ]
    changes: list[RowChange] = []
    for kind, table in after.rows.items():
        earlier = before.rows[kind]
        if earlier is table or _is_same(earlier, table):
            continue
        written = [
            RowChange(kind, address, earlier.get(address), row)
            for address, row in table.items()
            if earlier.get(address) is not row
        ]
        changes += written
        added_count = sum(change.old is None for change in written)
        if len(earlier) + added_count > len(table):
            changes += [
                RowChange(kind, address, row, None)
                for address, row in earlier.items()
                if address not in table
            ]
    return changes


def _is_same(earlier: Mapping[Address, Any], table: Mapping[Address, Any]) -> bool:
    """Whether a table has no writes. Most tables have none between two snapshots, so this check
    must be fast."""
    return len(earlier) == len(table) and all(map(is_, earlier.values(), table.values()))
