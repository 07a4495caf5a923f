"""SplitStore: one store made of two, with tasks, counters and events in the second
(docs/engines.md, Two stores).

What is where, the order of writes and the recovery are decided by `domain/run/two_stores.py`; this
module carries them out. It knows both stores only by their port.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import cast

import trio

from conveyor.domain.changes import (
    AnyKey,
    Applied,
    Change,
    Chunk,
    CrossingKey,
    Key,
    Missing,
    OpenQueue,
    R,
    Row,
    Stale,
    TaskKey,
    Verdict,
    find_refusal,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Crossing, Run, RunStatus
from conveyor.domain.queries import (
    Q,
    Query,
    RunsOf,
    TaskPage,
    TasksOf,
    UnfinishedCrossings,
)
from conveyor.domain.run import two_stores
from conveyor.domain.run.two_stores import Parts, Place
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from conveyor.ports.queue import Queue, send_opening
from conveyor.ports.store import Store

log = logging.getLogger(__name__)

# Each try finishes a change of another process.
_TRIES_MAX = 20
_PAGE = 100
# Until an idle job's unfinished change is finished. Every worker asks so often, and pays for it.
_PAUSE_S = 30.0


class SplitStore:
    """`new_token` makes a name for a change that no other change has."""

    def __init__(
        self,
        records: Store,
        tasks: Store,
        queue: Queue,
        *,
        now: Callable[[], float],
        new_token: Callable[[], str],
    ) -> None:
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._now = now
        self._new_token = new_token

    async def read(self, key: Key[R]) -> R | None:
        row = await self._store_of(cast("AnyKey", key)).read(key)
        if isinstance(row, Run) and two_stores.relies_on_second(row):
            await self._finish_left(row.job_id)
        return row

    def _store_of(self, key: AnyKey) -> Store:
        return self._tasks if two_stores.is_in_task_store(key) else self._records

    async def find(self, query: Query[Q]) -> list[Q]:
        in_tasks = isinstance(query, two_stores.TASK_STORE_QUERIES)
        return await (self._tasks if in_tasks else self._records).find(query)

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        return await self._tasks.page_tasks(query, read_max=read_max)

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        # Neighbours of one place are one call: the settles of a call are counted together.
        for place, group in groupby(changes, key=two_stores.place_of):
            same = list(group)
            try:
                verdicts += await self._commit_to(place, same)
            except Unavailable as error:
                if len(same) == len(changes):
                    raise
                raise _partly(error, verdicts, same, len(changes)) from error
        return verdicts

    async def _commit_to(self, place: Place, changes: Sequence[Change]) -> list[Verdict]:
        match place:
            case Place.RECORDS:
                return await self._records.commit(changes)
            case Place.TASKS:
                return await self._commit_tasks(changes)
            case Place.BOTH:
                # One by one. A caller that commits several of them can tell which were refused.
                return [await self._cross(change) for change in changes]

    async def _commit_tasks(self, changes: Sequence[Change]) -> list[Verdict]:
        if not any(change.effects for change in changes):
            return await self._tasks.commit(changes)
        # The queues are not the task store's own.
        verdicts = await self._tasks.commit([Change(change.writes) for change in changes])
        for change, verdict in zip(changes, verdicts, strict=True):
            if isinstance(verdict, Applied):
                await self._run_effects(change)
        return verdicts

    async def _cross(self, change: Change) -> Verdict:
        for _ in range(_TRIES_MAX):
            parts = two_stores.split(change, token=self._new_token(), now=self._now())
            refusal = await self._refusal_of_second(change, parts)
            if refusal is not None:
                if not await self._finish_left(parts.crossing.job_id):
                    return refusal
                continue
            (verdict,) = await self._records.commit([parts.first])
            if isinstance(verdict, Applied):
                return await self._finish_own(change, parts, verdict)
            if verdict.key != CrossingKey(parts.crossing.job_id):
                return verdict
            await self._finish_left(parts.crossing.job_id)
        raise Unavailable("the unfinished changes of a job do not end")

    async def _refusal_of_second(self, change: Change, parts: Parts) -> Stale | Missing | None:
        """Returns why the second part would be refused. No concurrent change
        is considered: afterwards, the first part alone decides."""
        rows: dict[AnyKey, Row | None] = {
            write.key: await self._tasks.read(write.key) for write in parts.second
        }
        if find_refusal(parts.second, rows) is None:
            return None
        rows |= {
            write.key: await self._records.read(write.key)
            for write in change.writes
            if write.key not in rows
        }
        return find_refusal(change.writes, rows)

    async def _finish_own(self, change: Change, parts: Parts, first: Applied) -> Applied:
        try:
            verdict = await self._write_second(parts.crossing)
        except Unavailable as error:
            # Not as it was raised: it may say that nothing was written.
            raise Unavailable(f"a change is decided, and not finished: {error}") from error
        try:
            await self._records.commit([two_stores.forget(parts.crossing)])
        except Unavailable as error:
            # A later attempt to finish it writes nothing more.
            log.info("finished change not removed", extra={"cause": str(error)})
        await self._run_effects(change)
        written = dict(zip((write.key for write in parts.first.writes), first.rows, strict=True))
        if isinstance(verdict, Applied):
            keys = (write.key for write in parts.second)
            written |= zip(keys, verdict.rows, strict=False)
        else:
            written |= {write.key: await self._tasks.read(write.key) for write in parts.second}
        return Applied(tuple(written[write.key] for write in change.writes))

    async def _write_second(self, crossing: Crossing) -> Verdict:
        """Writes the second part once. Applied if all of it was written by this call."""
        change, is_whole = two_stores.completion(crossing), True
        while True:
            (verdict,) = await self._tasks.commit([change])
            if isinstance(verdict, Applied):
                return verdict if is_whole else Stale(two_stores.mark_key(crossing))
            if verdict.key == two_stores.mark_key(crossing):
                return verdict
            change, is_whole = two_stores.without(change, verdict.key), False

    async def _finish_left(self, job_id: JobId) -> bool:
        """Finishes what another process has left, or is about to finish itself. Returns whether
        there was something."""
        crossing = await self._records.read(CrossingKey(job_id))
        if crossing is not None:
            await self._finish(crossing)
        return crossing is not None

    async def _finish(self, crossing: Crossing) -> None:
        await self._write_second(crossing)
        await self._records.commit([two_stores.forget(crossing)])

    async def finish_forever(self) -> None:
        """Finishes the changes of processes that stopped in between, if no other change does."""
        while True:
            try:
                await self.finish_unfinished()
            except Unavailable as error:
                log.info("unfinished changes not read", extra={"cause": str(error)})
            await trio.sleep(_PAUSE_S)

    async def finish_unfinished(self) -> int:
        left = await self._records.find(UnfinishedCrossings(limit=_PAGE))
        for crossing in left:
            await self._finish(crossing)
        return len(left)

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        refusal = await self._refusal_of_step(chunk)
        if refusal is not None and await self._finish_left(chunk.key.job_id):
            # The counters of a new run may be what was missing.
            refusal = await self._refusal_of_step(chunk)
        if refusal is not None:
            return refusal
        verdicts = await self._tasks.commit(two_stores.task_inserts(chunk))
        for verdict in verdicts:
            # A task that exists is left as it is. Closed counters end the step.
            if not isinstance(verdict, Applied) and not isinstance(verdict.key, TaskKey):
                return verdict
        if chunk.refs:
            await send_opening(self._queue, chunk.refs)
        (moved,) = await self._records.commit([Change((chunk.checkpoint,))])
        return moved

    async def _refusal_of_step(self, chunk: Chunk) -> Stale | Missing | None:
        writes = [chunk.checkpoint, *chunk.count_updates()]
        return find_refusal(
            writes, {write.key: await self._store_of(write.key).read(write.key) for write in writes}
        )

    async def _run_effects(self, change: Change) -> None:
        for effect in change.effects:
            if isinstance(effect, OpenQueue):
                await self._queue.open_run(effect.run_id)
            else:
                await send_opening(self._queue, effect.refs)

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        # First, or it would write rows of the deleted run later.
        await self._finish_left(job_id)
        if run_id is not None:
            return await self._delete_rows(job_id, run_id, limit)
        gone = 0
        query = RunsOf(job_id=job_id, statuses=frozenset(RunStatus), limit=_PAGE)
        while runs := await self._records.find(query):
            for run in runs:
                gone += await self._delete_rows(job_id, run.run_id, limit - gone)
                if gone >= limit:
                    return gone
        return gone + await self._delete_rows(job_id, None, limit - gone)

    async def _delete_rows(self, job_id: JobId, run_id: RunId | None, limit: int) -> int:
        gone = 0
        for store in (self._tasks, self._records):
            while gone < limit:
                count = await store.delete_run_rows(job_id, run_id, limit=limit - gone)
                if count == 0:
                    break
                gone += count
        return gone

    async def delete_expired(self, now: float) -> int:
        records = await self._records.delete_expired(now)
        return records + await self._tasks.delete_expired(now)


def _partly(
    error: Unavailable, known: Sequence[Verdict], failed: Sequence[Change], count: int
) -> PartlyUnavailable:
    """Returns the error of a call of which one group failed. The groups after it wrote nothing."""
    verdicts: list[Verdict | None] = [*known]
    turned_away = set(range(len(known) + len(failed), count))
    if isinstance(error, PartlyUnavailable):
        verdicts += error.verdicts
        turned_away |= {len(known) + number for number in error.turned_away}
    verdicts += [None] * (count - len(verdicts))
    return PartlyUnavailable(str(error), verdicts, turned_away)
