"""Store: the system of record for jobs, runs, batches, tasks, counters and intents
(docs/engines.md; docs/storage.md, Damaged rows)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from conveyor.domain.changes import Change, Chunk, Key, R, Verdict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.queries import Q, Query, TaskPage, TasksOf
from conveyor.ports.errors import RowDamaged


class Store(Protocol):
    """Laws:

    - A change that `commit` or `put_chunk` answered with Applied is durable, and every later read
      sees it.
    - A change is applied as a whole or not at all; a change with a failed guard writes nothing.
    - Missing outranks Stale: if one write of a change lacks its row, the verdict is Missing.
    - No update creates a row.
    - An insert over an existing row is Stale, unless that row has expired.
    - Applied carries the rows as written, in the order of the writes; None for quiet writes.
    - If all changes of a call are settles (`SettleChange`), Applied shows their counters as they
      are after the call.
    - The changes of one call are decided one by one, in order; a refused change does not affect the
      others.
    - The effects of an applied change happen; those of a refused change do not.
    - References that a change or a chunk sends create the queue of their run if it does not exist.
    - Any method may raise Unavailable; the outcome of a write is then unknown. A commit may raise
      PartlyUnavailable, which has the known verdicts and the changes that wrote nothing.
    """

    async def read(self, key: Key[R]) -> R | None:
        """Returns the row under this key as of its last commit, or None."""

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        """Applies each change atomically and returns a verdict for each, in order."""

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        """Performs one ingest step.

        - A task that exists is not changed, whatever its state: ingest only inserts.
        - Rows exist before their references can be received, and references exist before the
          checkpoint moves.
        - Counters and checkpoint move together, once per step, and only while the batch has this
          epoch and is at `done_before`, and every counter state is in `gate_in`; otherwise the
          verdict is Stale.
        - A step of unknown outcome may be repeated.
        - Applied carries the batch.
        """

    async def find(self, query: Query[Q]) -> list[Q]:
        """Returns the rows that match the query, in its order, at most `limit` of them."""

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        """Returns a page of tasks and reads about `read_max` rows, however rare the matching tasks
        are.

        - The page may be short or empty and still name the id after which the next page starts.
        - A reader that continues there until nothing is left sees each task once.
        - Every page ends at a later id than the one before.
        """

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        """Removes up to `limit` rows of a deleted run, or of a whole job except the job's own row.

        Returns the number of removed rows; 0 means that nothing is left. The job's own row stays.
        """

    async def delete_expired(self, now: float) -> int:
        """Removes idempotency records and events that expired before `now`. Returns how many."""


log = logging.getLogger(__name__)

# Bounds the log and the set of logged rows. An operator with more damaged rows needs no longer
# list.
_ROWS_MAX = 1_000


class DamageLog:
    """Logs each stored row that cannot be decoded, once. For engines."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note_skipped(self, error: RowDamaged) -> None:
        """Logs a row that a `find` left out."""
        row = (error.kind, error.address)
        if row not in self._logged and len(self._logged) < _ROWS_MAX:
            self._logged.add(row)
            log.error("damaged row skipped: %s", error)
