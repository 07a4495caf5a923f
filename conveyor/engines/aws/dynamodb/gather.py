"""Runs many calls concurrently and returns their answers in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from conveyor.engines.aws.errors import AwsError
from conveyor.ports.errors import Unavailable

# Concurrent calls of one `gather`. More would use more connections and throttle sooner.
PARALLEL_MAX = 64

A = TypeVar("A")
B = TypeVar("B")


async def gather(work: Callable[[A], Awaitable[B]], given: Sequence[A]) -> list[B]:
    """Runs all calls, even if some fail. Then raises the first failure.

    A failure must not cancel the others: a cancelled write has an unknown outcome.
    """
    if len(given) == 1:  # The common case needs no nursery.
        return [await work(given[0])]
    answers: dict[int, B] = {}
    failures: list[AwsError | Unavailable] = []
    limiter = trio.CapacityLimiter(PARALLEL_MAX)

    async def do(number: int, one: A) -> None:
        async with limiter:
            try:
                answers[number] = await work(one)
            except (AwsError, Unavailable) as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        for number, one in enumerate(given):
            nursery.start_soon(do, number, one)
    if failures:
        raise failures[0]
    return [answers[number] for number in range(len(given))]


def slices(given: Sequence[A], size: int) -> list[Sequence[A]]:
    return [given[at : at + size] for at in range(0, len(given), size)]
