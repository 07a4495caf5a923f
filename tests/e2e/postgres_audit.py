"""Audits a Postgres deployment with a folder of bodies, without the program: checks that rows,
counters and bodies agree."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import trio

from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import Result, TaskStatus
from conveyor.engines.sqlite.blobs import place_in
from tests.postgres import execute

_COUNTERS = """
SELECT run_id, sum(admitted)::bigint, sum(done)::bigint, sum(successful)::bigint,
    sum(failed)::bigint
FROM stats GROUP BY run_id
"""
_TASKS = "SELECT run_id, status, result FROM tasks"


def violations(url: str, blob_dir: Path) -> list[str]:
    """Returns every violated invariant of a deployment's rows and bodies."""
    counters = _rows(url, _COUNTERS)
    tasks = _rows(url, _TASKS)
    problems: list[str] = []
    for run_id, admitted, done, successful, failed in counters:
        statuses = [status for run, status, _ in tasks if run == run_id]
        facts = {
            "admitted = rows": admitted == len(statuses),
            "done = terminal rows": done == sum(status in TASK_TERMINAL for status in statuses),
            "successful = rows": successful == statuses.count(TaskStatus.SUCCESSFUL),
            "failed = rows": failed == statuses.count(TaskStatus.FAILED),
        }
        problems += [
            f"{run_id}: {fact} does not hold" for fact, holds in facts.items() if not holds
        ]
    for run_id, _, result in tasks:
        if result is not None and not _is_intact(
            blob_dir, msgspec.json.decode(result, type=Result)
        ):
            problems.append(f"{run_id}: a body differs from its row")
    return problems


def leases_count(url: str, run_id: str) -> int:
    """Counts the leases of one run. Other leases protect background work, such as sweeps."""
    ((count,),) = _rows(
        url,
        "SELECT count(*) FROM leases WHERE expires_at > extract(epoch FROM clock_timestamp())"
        f" AND run_id = '{run_id}'",
    )
    return int(count)


def _rows(url: str, sql: str) -> list[tuple[Any, ...]]:
    return trio.run(execute, url, sql)


def _is_intact(blob_dir: Path, result: Result) -> bool:
    place = place_in(str(blob_dir / "blobs"), result.key)
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        body = file.read(result.size_bytes)
    return hashlib.sha256(body).hexdigest() == result.sha256
