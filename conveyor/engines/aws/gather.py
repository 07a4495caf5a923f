"""Runs many calls concurrently and returns their answers in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from conveyor.engines.aws.errors import AwsError
from conveyor.ports.errors import QueueGone, Unavailable

# Concurrent calls of one `gather`. More would use more connections and throttle sooner.
PARALLEL_MAX = 64

A = TypeVar("A")
B = TypeVar("B")
Failure = AwsError | QueueGone | Unavailable


async def gather(work: Callable[[A], Awaitable[B]], items: Sequence[A]) -> list[B]:
    """Runs `work` for all items, even if some fail. Then raises the first failure."""
    return unwrap_all(await gather_results([partial(work, item) for item in items]))


async def gather_results(
    jobs: Sequence[Callable[[], Awaitable[B]]], *, parallel_max: int = PARALLEL_MAX
) -> list[B | Failure]:
    """Runs the jobs, at most `parallel_max` at a time. Returns results or errors, in order.

    A failure must not cancel the others: a cancelled write has an unknown outcome.
    """
    results: dict[int, B | Failure] = {}
    numbers = iter(range(len(jobs)))

    async def work() -> None:
        for number in numbers:
            try:
                results[number] = await jobs[number]()
            except (AwsError, QueueGone, Unavailable) as error:
                results[number] = error

    if len(jobs) == 1:  # The common case needs no nursery.
        await work()
    else:
        async with trio.open_nursery() as nursery:
            for _ in range(min(parallel_max, len(jobs))):
                nursery.start_soon(work)
    return [results[number] for number in range(len(jobs))]


def unwrap_all(results: Sequence[B | Failure]) -> list[B]:
    """Returns the results, or raises the first error."""
    answers: list[B] = []
    for result in results:
        if isinstance(result, Failure):
            raise result
        answers.append(result)
    return answers


def slices(items: Sequence[A], size: int) -> list[Sequence[A]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
