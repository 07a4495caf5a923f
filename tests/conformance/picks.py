"""What a walk picks from: the runs there are, and the things in hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from conveyor.domain.ids import JobId, RunId
from tests.builders import a_ulid

T = TypeVar("T")

RUNS = [(JobId(a_ulid(1)), RunId(a_ulid(11))), (JobId(a_ulid(1)), RunId(a_ulid(12)))]
RUNS += [(JobId(a_ulid(2)), RunId(a_ulid(21)))]


async def stream(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def newest(things: Sequence[T], number: int) -> T | None:
    """The thing in hand that is `number` back from the newest."""
    return things[-1 - number % len(things)] if things else None


def some_run(number: int) -> tuple[JobId, RunId]:
    """Mostly the first: work that gathers in one place meets itself."""
    return RUNS[max(0, number % 6 - 3)]


def job_of(run_id: RunId) -> JobId:
    return next(job_id for job_id, each in RUNS if each == run_id)
