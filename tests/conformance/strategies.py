"""What the steps of a random history choose from: a few runs, and the things received so far."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

import msgspec

from conveyor.domain.changes import AnyKey, Change, TaskKey
from conveyor.domain.ids import JobId, RunId
from tests.builders import a_ulid

T = TypeVar("T")

RUNS = [(JobId(a_ulid(1)), RunId(a_ulid(11))), (JobId(a_ulid(1)), RunId(a_ulid(12)))]
RUNS += [(JobId(a_ulid(2)), RunId(a_ulid(21)))]


async def stream(pieces: list[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


def newest(things: Sequence[T], number: int) -> T | None:
    """The item that is `number` back from the newest."""
    return things[-1 - number % len(things)] if things else None


def some_run(number: int) -> tuple[JobId, RunId]:
    """Mostly the first run, so that steps affect each other."""
    return RUNS[max(0, number % 6 - 3)]


def job_of(run_id: RunId) -> JobId:
    return next(job_id for job_id, other_run_id in RUNS if other_run_id == run_id)


def with_job(key: AnyKey) -> AnyKey:
    """Returns a task's key with the job of its run, which the task row does not contain."""
    if isinstance(key, TaskKey):
        return msgspec.structs.replace(key, job_id=job_of(key.run_id))
    return key


def with_jobs(change: Change) -> Change:
    writes = (msgspec.structs.replace(write, key=with_job(write.key)) for write in change.writes)
    return msgspec.structs.replace(change, writes=tuple(writes))
