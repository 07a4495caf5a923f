"""TaskTables: which table has the tasks of a run (docs/storage.md, Postgres tables).

Most runs share the table `tasks`. A long run has a table of its own, because deleting it is then a
DROP: removing a million rows one by one takes minutes, and leaves as many dead rows to vacuum. A
table per run for all runs would be too many tables.

The own table is created in the change that creates the run, and dropped with its rows. So what is
known of a run stays true until it is deleted, and may be remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from conveyor.domain.ids import JobId, RunId
from conveyor.engines.postgres.connection import Statement
from conveyor.engines.postgres.database import Database

SHARED = "ONLY tasks"
# Deleting fewer rows takes a second; more tables cost the planner and the catalogue.
OWN_TABLE_TASKS_MIN = 50_000
# See schema/0009_task_fillfactor.sql.
_FILL_PERCENT = 30
_REMEMBERED_MAX = 10_000
_ID = re.compile(r"[0-9A-Za-z]{1,40}\Z")


class TaskTables:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._places: dict[RunId, str] = {}

    async def place(self, run_id: RunId) -> str:
        return (await self.places([run_id]))[run_id]

    async def places(self, run_ids: Iterable[RunId]) -> Mapping[RunId, str]:
        """Returns the name of the table for each run, as it is written in statements."""
        distinct = set(run_ids)
        places = {run_id: self._places[run_id] for run_id in distinct if run_id in self._places}
        unknown = list(distinct - places.keys())
        if unknown:
            sql = "SELECT run_id FROM task_tables WHERE run_id = ANY($1)"
            answer = await self._database.read(Statement(sql, [unknown]))
            with_own = {run_id for (run_id,) in answer.rows}
            news = {run_id: _own(run_id) if run_id in with_own else SHARED for run_id in unknown}
            if len(self._places) >= _REMEMBERED_MAX:
                self._places.clear()
            self._places.update(news)
            places.update(news)
        return places

    def forget(self, run_ids: Iterable[RunId]) -> None:
        """The tables of these runs may have been dropped or created since."""
        for run_id in run_ids:
            self._places.pop(run_id, None)


def creation_of(job_id: str, run_id: str, tasks: int) -> Sequence[Statement]:
    """Returns what creates the own table of a new run of so many tasks, if it needs one."""
    if tasks < OWN_TABLE_TASKS_MIN or not _ID.match(run_id):
        return []
    table = _own(run_id)
    return [
        # Inheritance: a script that adds a column to `tasks` adds it here too. LIKE copies the
        # indexes, but not the fill factor.
        Statement(
            f"CREATE TABLE {table} (LIKE tasks INCLUDING ALL) INHERITS (tasks) "
            f"WITH (fillfactor = {_FILL_PERCENT})"
        ),
        Statement("INSERT INTO task_tables (run_id, job_id) VALUES ($1, $2)", (run_id, job_id)),
    ]


def drop_of(run_id: RunId) -> Sequence[Statement]:
    return [
        Statement(f"DROP TABLE IF EXISTS {_own(run_id)}"),
        Statement("DELETE FROM task_tables WHERE run_id = $1", (run_id,)),
    ]


def own_tables(job_id: JobId, run_id: RunId | None) -> Statement:
    """Selects the runs of a job that have a table of their own."""
    sql = "SELECT run_id FROM task_tables WHERE job_id = $1"
    if run_id is None:
        return Statement(sql, (job_id,))
    return Statement(f"{sql} AND run_id = $2", (job_id, run_id))


def _own(run_id: str) -> str:
    assert _ID.match(run_id), run_id
    return f'"tasks_{run_id}"'
