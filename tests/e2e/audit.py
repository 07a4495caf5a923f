"""Audits a data directory without the program: checks that rows, counters and bodies agree."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from pathlib import Path

from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE, TASK_TERMINAL
from conveyor.domain.model import RunStatus, TaskStatus


def violations(data_dir: Path) -> list[str]:
    """Returns every violated invariant of a data directory.

    Deleted jobs and runs are ignored: they are invisible, and their rows are removed in steps.
    """
    with sqlite3.connect(f"file:{data_dir / 'conveyor.db'}?mode=ro", uri=True) as db:
        db.row_factory = sqlite3.Row
        jobs = {row["job_id"] for row in db.execute("SELECT * FROM jobs") if _is_visible(row)}
        runs = [run for run in db.execute("SELECT * FROM runs") if run["job_id"] in jobs]
        runs = [run for run in runs if run["status"] in RUN_VISIBLE]
        problems: list[str] = []
        for run in runs:
            problems += _of_run(db, run)
            problems += _of_bodies(db, run, data_dir)
    db.close()
    return problems


def _is_visible(job: sqlite3.Row) -> bool:
    return job["status"] in JOB_VISIBLE


def _of_run(db: sqlite3.Connection, run: sqlite3.Row) -> list[str]:
    run_id = run["run_id"]
    rows = db.execute(
        "SELECT status, count(*) FROM tasks WHERE run_id = ? GROUP BY status", (run_id,)
    )
    statuses = Counter(dict(rows.fetchall()))
    stats = db.execute(
        "SELECT sum(admitted) admitted, sum(done) done, sum(successful) successful,"
        " sum(failed) failed FROM stats WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    done = sum(statuses[status] for status in TASK_TERMINAL)
    facts = {
        "admitted = rows": stats["admitted"] == statuses.total(),
        "done = terminal rows": stats["done"] == done,
        "successful = rows": stats["successful"] == statuses[TaskStatus.SUCCESSFUL],
        "failed = rows": stats["failed"] == statuses[TaskStatus.FAILED],
        "done <= planned": done <= run["planned"],
    }
    if run["status"] == RunStatus.COMPLETED:
        facts["completed: every line is terminal"] = done == run["total"] == run["planned"]
        facts["completed: no batch is open"] = run["open_batches"] == 0
    return [f"run {run_id}: {fact} does not hold" for fact, holds in facts.items() if not holds]


def _of_bodies(db: sqlite3.Connection, run: sqlite3.Row, data_dir: Path) -> list[str]:
    problems = []
    rows = db.execute(
        "SELECT task_id, result FROM tasks WHERE run_id = ? AND status = ?",
        (run["run_id"], TaskStatus.SUCCESSFUL),
    )
    for row in rows:
        key, size_bytes, sha256, *_ = json.loads(row["result"])
        body = _body(data_dir, key)
        if body is None or len(body) != size_bytes or hashlib.sha256(body).hexdigest() != sha256:
            problems.append(f"task {row['task_id']}: its body is missing or not what was stored")
    return problems


def _body(data_dir: Path, key: str) -> bytes | None:
    """Returns the bytes of the pack at the offset that the key names."""
    prefix, _, last = key.rpartition("/")
    mark, name, offset, size_bytes = last.split(".")
    path = data_dir / "blobs" / prefix / f"{mark}.,{name}"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(int(offset))
        return file.read(int(size_bytes))
