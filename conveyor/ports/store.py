"""Store: the system of record for jobs, runs, batches, tasks, counters and intents
(docs/engines.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conveyor.domain.changes import Change, Chunk, Key, R, Verdict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.queries import Q, Query, TaskPage, TasksOf


class Store(Protocol):
    """Laws:

    - What `commit` or `put_chunk` answered with Applied is durable, and every later read sees it.
    - A change happens as a whole or not at all; a failed guard writes nothing.
    - Missing outranks Stale: where one write lacks its row, that is the answer.
    - No update creates a row.
    - An insert over an existing row is Stale, unless that row has expired.
    - Applied carries the rows as written, in the order of the writes; None for quiet ones.
    - Where all changes of a call are tallies, their counters are shown as the call left them.
    - The changes of one call are judged one by one, in order; one refusal spares the others.
    - The effects of an applied change happen; those of a refused one do not.
    - Refs that a change or a chunk sends make their run's queue where there is none.
    - Any method may raise Unavailable; the outcome of a write is then unknown. A commit may raise
      PartlyUnavailable, with the verdicts that are known, and those changes that wrote nothing.
    """

    async def read(self, key: Key[R]) -> R | None:
        """The row under this key as of its last commit, or None."""

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        """Applies each change atomically and answers for each, in order."""

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        """Performs one ingest step.

        - A task that exists is left as it is, whatever its state: ingest only inserts.
        - Rows exist before their refs can be received, and refs before the checkpoint moves.
        - Counts and checkpoint move together, once per step, and only while the batch has this
          epoch and stands at `done_before`, and every gate is in `gate_in`; else Stale.
        - Repeating a step whose outcome was unknown is harmless.
        - Applied carries the batch.
        """

    async def find(self, query: Query[Q]) -> list[Q]:
        """The rows that the query asks for, in its order, at most `limit` of them."""

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        """A page of tasks for about `read_max` rows read, however rare what is asked for may be.

        - It may be short, or empty, and still say behind which id to go on.
        - Who goes on there until nothing is left sees each task once.
        - Every page gets further than the one before.
        """

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        """Removes up to `limit` rows of a deleted run, or of a whole job (all but its own row).

        Answers how many rows went; 0 means that nothing is left. The job's own row stays.
        """

    async def delete_expired(self, now: float) -> int:
        """Removes key records and events that expired before `now`; answers how many."""
