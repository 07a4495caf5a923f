"""Optimistic retry: read, decide, commit, and start again if another writer was faster
(docs/engines.md, Changes and guards).

A failed guard only shows that the rows have changed, so each attempt starts with its first read.
There is no pause between attempts: if one fails, another writer has made progress.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TypeVar

from conveyor.domain.errors import Conflict

T = TypeVar("T")

# Ends the loop for a guard that can never hold, and for a row that many writers change all the
# time.
ATTEMPTS_MAX = 50


class Again(Enum):
    """The result of an attempt that must be repeated: its rows were changed by another writer, or
    the attempt has changed them itself and must read the new rows."""

    AGAIN = "again"


AGAIN = Again.AGAIN

Attempt = Callable[[], Awaitable[T | Again]]


async def retry(attempt: Attempt[T]) -> T | Again:
    """Returns the first result of an attempt, or AGAIN if no attempt has one."""
    for _ in range(ATTEMPTS_MAX):
        result = await attempt()
        if not isinstance(result, Again):
            return result
    return AGAIN


async def retry_or_refuse(subject: str, attempt: Attempt[T]) -> T:
    """Like `retry`, for a caller's request: raises Conflict if no attempt has a result. `subject`
    begins the sentence: "The run is"."""
    result = await retry(attempt)
    if isinstance(result, Again):
        raise Conflict(f"{subject} changing too fast; try again.", retry_after_s=1)
    return result
