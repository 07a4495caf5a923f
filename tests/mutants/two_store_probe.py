"""Probe of the store made of two: the order of the writes, the state after a crash between them,
and what a reader then finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from conveyor.domain.changes import Change, RunKey, Verdict
from conveyor.domain.model import Totals
from conveyor.domain.queries import StatsOf, UnfinishedCrossings
from conveyor.domain.run import termination
from conveyor.domain.submit import admission
from conveyor.engines.memory import memory_engine
from conveyor.engines.two_stores import SplitStore
from conveyor.ports.errors import Unavailable
from tests.builders import JOB, RUN, T0, ManualClock, a_batch, a_job, a_run, a_task
from tests.conformance.test_chunks import a_chunk


@dataclass
class NotedStore:
    """A store that notes each write. If `fails` is set, the next commit fails without a write."""

    name: str
    store: Any
    notes: list[object]
    fails: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        keys = [[type(write.key).__name__ for write in change.writes] for change in changes]
        self.notes.append((self.name, keys))
        if self.fails:
            self.fails = False
            raise Unavailable("nothing was written")
        verdicts: list[Verdict] = await self.store.commit(changes)
        return verdicts

    async def delete_run_rows(self, *place: Any, limit: int) -> int:
        gone: int = await self.store.delete_run_rows(*place, limit=limit)
        self.notes.append((self.name, gone))
        return gone


async def changes_of_two_stores(_: object) -> object:
    notes: list[object] = []
    clock, random = ManualClock(), Random(1)
    engine, other = (memory_engine(clock=clock, random=random) for _ in range(2))
    records, tasks = (
        NotedStore("records", engine.store, notes),
        NotedStore("tasks", other.store, notes),
    )
    tokens = iter(range(100))
    store = SplitStore(
        records, tasks, engine.queue, now=clock.now, new_token=lambda: str(next(tokens))
    )

    async def commit_half(change: Change) -> None:
        tasks.fails = True
        try:
            await store.commit([change])
        except Unavailable:
            notes.append(await records.find(UnfinishedCrossings(limit=10)))

    job, run = a_job(active_run_id=RUN, latest_run_id=RUN), a_run(open_batches=1)
    await commit_half(admission.new_job(job, run, a_batch(epoch=1), []))
    notes.append(await store.put_chunk(a_chunk(a_task())))
    await commit_half(termination.request_stop(run, reason="user", now=T0))
    stopping = await store.read(RunKey(JOB, RUN)) or run
    notes.append(await store.find(StatsOf(job_id=JOB, run_id=RUN, shard_count=1)))
    await commit_half(termination.finish_stop(job, stopping, Totals(), now=T0))
    notes.append(await store.finish_unfinished())
    notes.append(await store.delete_run_rows(JOB, RUN, limit=100))
    return notes
