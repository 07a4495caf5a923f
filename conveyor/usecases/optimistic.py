"""Optimistic retry: read, decide, commit; if another writer came first, all of it again
(docs/engines.md, Changes and guards).

A guard that fails says only that the rows have changed, so an attempt starts with its first read.
There is no pause between attempts: where one fails, another writer has got on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TypeVar

from conveyor.domain.errors import Conflict

T = TypeVar("T")

# Ends the loop of a guard that can never hold, and of a row that many write to all the time.
ATTEMPTS_MAX = 50


class Again(Enum):
    """What an attempt answers that has to be repeated: its rows were changed meanwhile, or it has
    changed them itself and they are to be read as they are now."""

    AGAIN = "again"


AGAIN = Again.AGAIN

Attempt = Callable[[], Awaitable[T | Again]]


async def retry(attempt: Attempt[T]) -> T | Again:
    """The answer of the first attempt that has one; AGAIN if none of them has."""
    for _ in range(ATTEMPTS_MAX):
        result = await attempt()
        if not isinstance(result, Again):
            return result
    return AGAIN


async def retry_or_refuse(subject: str, attempt: Attempt[T]) -> T:
    """The same on behalf of a caller, who is refused with Conflict if no attempt has an answer.
    `subject` begins the sentence: "The run is"."""
    result = await retry(attempt)
    if isinstance(result, Again):
        raise Conflict(f"{subject} changing too fast; try again.", retry_after_s=1)
    return result
