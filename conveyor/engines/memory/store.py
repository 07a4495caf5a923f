"""MemoryStore: one dict per row kind, and the queue for effects (docs/engines.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, assert_never, cast

import msgspec
import trio

from conveyor.domain.changes import (
    AnyKey,
    Applied,
    Change,
    Chunk,
    Delete,
    Enqueue,
    Guard,
    Insert,
    Key,
    Missing,
    R,
    Row,
    Stale,
    StatsKey,
    TaskKey,
    Update,
    Verdict,
    Write,
    is_tally,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import IdempotencyRecord
from conveyor.domain.queries import AnyQuery, Q, Query, TaskPage, TasksOf, page_of
from conveyor.engines.memory.queries import Address, Table, Tables
from conveyor.engines.memory.queue import MemoryQueue


class MemoryStore(Tables):
    def __init__(self, queue: MemoryQueue) -> None:
        super().__init__()
        self._queue = queue

    async def read(self, key: Key[R]) -> R | None:
        await trio.lowlevel.checkpoint()
        return cast("R | None", self._row(cast("AnyKey", key)))

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for change in changes:
            # The law is that changes of one call are judged one by one. The checkpoint lets other
            # callers write in between, as they may with a real engine.
            await trio.lowlevel.checkpoint()
            verdicts.append(self._apply(change))
        if all(map(is_tally, changes)):
            return list(map(self._with_counter, changes, verdicts))
        return verdicts

    def _with_counter(self, change: Change, verdict: Verdict) -> Verdict:
        """Replaces the counters of a tally by those after the whole call."""
        if not isinstance(verdict, Applied):
            return verdict
        flip, _ = verdict.rows
        _, count = change.writes
        return Applied((flip, self._tables[type(count.key)][_address(count.key)]))

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        await trio.lowlevel.checkpoint()
        verdict = self._apply(_as_change(chunk))
        if isinstance(verdict, Applied):
            for task in chunk.tasks:
                # A task that exists is kept: a repeated step must not reset it.
                self._tasks.setdefault((task.run_id, task.task_id), task)
            return Applied(verdict.rows[:1])
        return verdict

    async def find(self, query: Query[Q]) -> list[Q]:
        await trio.lowlevel.checkpoint()
        return cast("list[Q]", self.find_rows(cast("AnyQuery", query)))

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        """Reads at most `read_max` rows, although it could read all: callers must handle pages that
        end early, and this engine tests them."""
        await trio.lowlevel.checkpoint()
        read = self._tasks_of(msgspec.structs.replace(query, statuses=None, limit=read_max))
        found = [row for row in read if query.statuses is None or row.status in query.statuses]
        page = page_of(found[: query.limit], query)
        if page.until is None and len(read) == read_max:
            return TaskPage(page.tasks, read[-1].task_id)
        return page

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        await trio.lowlevel.checkpoint()
        doomed = list(islice(self._rows_to_scrub(job_id, run_id), limit))
        for table, address in doomed:
            del table[address]
        return len(doomed)

    async def delete_expired(self, now: float) -> int:
        await trio.lowlevel.checkpoint()
        tables: list[Table] = [self._records, self._events]
        expired = [
            (table, at) for table in tables for at, row in table.items() if row.expires_at < now
        ]
        for table, address in expired:
            del table[address]
        return len(expired)

    def _row(self, key: AnyKey) -> Row | None:
        row: Row | None = self._tables[type(key)].get(_address(key))
        return row

    def _apply(self, change: Change) -> Verdict:
        rooms = {(type(write.key), _address(write.key)) for write in change.writes}
        assert len(rooms) == len(change.writes), "two writes to one row in one change"
        # All guards are checked before the first write, so a refused change writes nothing.
        refusals = [no for write in change.writes if (no := self._refusal(write)) is not None]
        if refusals:
            return next((no for no in refusals if isinstance(no, Missing)), refusals[0])
        rows = tuple(self._write(write) for write in change.writes)
        for effect in change.effects:
            self._queue.enqueue_nowait(effect.refs)
        return Applied(rows)

    def _refusal(self, write: Write) -> Stale | Missing | None:
        row = self._row(write.key)
        match write:
            case Insert():
                fits = row is None or _has_expired(row, write.over_expired_at)
            case Update():
                if row is None:
                    return Missing(write.key)
                fits = _holds(write.guard, row)
            case Delete():
                fits = row is None or _holds(write.guard, row)
            case _:
                assert_never(write)
        return None if fits else Stale(write.key, row)

    def _write(self, write: Write) -> Row | None:
        table, address = self._tables[type(write.key)], _address(write.key)
        match write:
            case Insert():
                table[address] = write.row
            case Update():
                assert not write.values.keys() & write.deltas.keys()
                old = table[address]
                sums = {name: getattr(old, name) + delta for name, delta in write.deltas.items()}
                table[address] = msgspec.structs.replace(old, **write.values, **sums)
            case Delete():
                table.pop(address, None)
            case _:
                assert_never(write)
        return None if isinstance(write, Update) and write.is_quiet else table.get(address)

    def _rows_to_scrub(
        self, job_id: JobId, run_id: RunId | None
    ) -> Iterator[tuple[Table, Address]]:
        """Yields the rows to delete, runs last: a task row has no job id, so only the run rows
        connect tasks to a job."""
        runs = [run for run in self._runs.values() if run.job_id == job_id]
        run_ids = {run.run_id for run in runs} if run_id is None else {run_id}
        for address, task in self._tasks.items():
            if task.run_id in run_ids:
                yield self._tasks, address
        tables: list[Table] = [
            self._stats,
            self._batches,
            self._notices,
            self._events,
            self._exports,
            self._budgets,
            self._shares,
            self._runs,
        ]
        for table in tables:
            for address, row in table.items():
                if row.job_id == job_id and run_id in {None, row.run_id}:
                    yield table, address


def _address(key: AnyKey) -> Address:
    if isinstance(key, TaskKey):  # A task row has no job id.
        return (key.run_id, key.task_id)
    return msgspec.structs.astuple(key)


def _holds(guard: Guard, row: Row) -> bool:
    if guard.status_in is not None and cast("Any", row).status not in guard.status_in:
        return False
    if any(getattr(row, name) != value for name, value in guard.equals):
        return False
    if guard.at_least is not None and getattr(row, guard.at_least[0]) < guard.at_least[1]:
        return False
    return guard.lapsed is None or getattr(row, guard.lapsed[0]) < guard.lapsed[1]


def _has_expired(row: Row, now: float | None) -> bool:
    return now is not None and cast("IdempotencyRecord", row).expires_at < now


def _as_change(chunk: Chunk) -> Change:
    """Returns checkpoint, counts and references of an ingest step as one change."""
    fence = Guard(equals=(("epoch", chunk.epoch), ("done", chunk.done_before)))
    gate = Guard(status_in=chunk.gate_in)
    counts = [
        Update(StatsKey(chunk.key.job_id, chunk.key.run_id, shard), gate, deltas=deltas)
        for shard, deltas in sorted(chunk.stats.items())
    ]
    return Change(
        writes=(Update(chunk.key, fence, values=chunk.values), *counts),
        effects=(Enqueue(chunk.refs),),
    )
