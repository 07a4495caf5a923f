"""DynamoStore: the system of record on one DynamoDB table (docs/engines.md, DynamoDB store).

A change of one row is one conditional write; a change of several rows is one transaction. The store
sends task references after the rows that they name, because a reference without a row could not be
worked on. If a crash loses a reference in between, the sweeper sends it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from conveyor.domain.changes import (
    AnyKey,
    Applied,
    Change,
    Chunk,
    Key,
    OpenQueue,
    R,
    SettleChange,
    Verdict,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.queries import AnyQuery, Q, Query, TaskPage, TasksOf
from conveyor.engines.aws.dynamodb import deletion, ingest, queries, transactions
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.dynamodb.transactions import ThrottledWrite, apply_settles
from conveyor.engines.aws.gather import gather
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from conveyor.ports.queue import Queue, send_opening


class DynamoStore:
    def __init__(self, table: Table, queue: Queue) -> None:
        self._table = table
        self._queue = queue

    async def read(self, key: Key[R]) -> R | None:
        return cast("R | None", await self._table.get(cast("AnyKey", key)))

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        if not changes:
            return []
        settles = [change for change in changes if isinstance(change, SettleChange)]
        if len(settles) == len(changes):
            return await apply_settles(self._table, settles)
        verdicts: dict[int, Verdict] = {}
        turned_away: set[int] = set()
        for wave in _waves(changes):
            try:
                await gather(partial(self._judge, changes, verdicts, turned_away), wave)
            except Unavailable as error:
                # The verdicts that are known must reach the caller: it continues with the tasks
                # that were claimed, and retries those that were certainly not written.
                if verdicts or turned_away:
                    known = [verdicts.get(number) for number in range(len(changes))]
                    raise PartlyUnavailable(str(error), known, turned_away) from error
                raise
        return [verdicts[number] for number in range(len(changes))]

    async def _judge(
        self,
        changes: Sequence[Change],
        verdicts: dict[int, Verdict],
        turned_away: set[int],
        number: int,
    ) -> None:
        try:
            verdicts[number] = await self._apply(changes[number])
        except ThrottledWrite:
            turned_away.add(number)
            raise

    async def _apply(self, change: Change) -> Verdict:
        verdict = await transactions.apply(self._table, change)
        # Effects of an applied change only, and after it: a reference must name an existing row.
        if isinstance(verdict, Applied):
            for effect in change.effects:
                if isinstance(effect, OpenQueue):
                    await self._queue.open_run(effect.run_id)
                else:
                    await send_opening(self._queue, effect.refs)
        return verdict

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        return await ingest.put_chunk(self._table, chunk, partial(send_opening, self._queue))

    async def find(self, query: Query[Q]) -> list[Q]:
        return cast("list[Q]", await queries.find(self._table, cast("AnyQuery", query)))

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        return await queries.page_tasks(self._table, query, read_max=read_max)

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        return await deletion.delete_run_rows(self._table, job_id, run_id, limit=limit)

    async def delete_expired(self, now: float) -> int:
        return await deletion.delete_expired(self._table, now)


def _waves(changes: Sequence[Change]) -> list[list[int]]:
    """Returns the changes in waves. Changes of one wave share no row and run concurrently.

    Changes that share a row are in different waves, in their order.
    """
    waves: list[list[int]] = []
    behind: dict[AnyKey, int] = {}
    for number, change in enumerate(changes):
        keys = [write.key for write in change.writes]
        turn = max((behind.get(key, 0) for key in keys), default=0)
        if turn == len(waves):
            waves.append([])
        waves[turn].append(number)
        behind.update(dict.fromkeys(keys, turn + 1))
    return waves
