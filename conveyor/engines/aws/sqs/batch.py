"""Batch calls of SQS: ten entries each, repeated until SQS has answered every entry
(docs/engines.md, Queues on SQS).

A successful batch may have failed in part. An entry counts as done only if the answer lists it as
successful. That it is missing among the failures proves nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from conveyor.domain.ids import Random
from conveyor.engines.aws.client.client import Answer, Params
from conveyor.engines.aws.client.retry import ATTEMPTS_MAX, backoff_s
from conveyor.engines.aws.errors import THROTTLES, AwsError
from conveyor.ports.errors import QueueGone, Unavailable

ENTRIES_MAX = 10  # The limit of SQS.
# Concurrent calls of one batch operation. More would use more connections, fewer take longer.
CONCURRENT_CALLS_MAX = 8
ROUNDS_S_MAX = 20.0
"""No new round begins after so long: received messages become visible again after 60 s."""

_DEAD_RECEIPTS = frozenset(
    {"InvalidParameterValue", "MessageNotInflight", "ReceiptHandleIsInvalid"}
)

T = TypeVar("T")
Entry = Mapping[str, Any]
Failure = AwsError | QueueGone | Unavailable
Ask = Callable[[str, Params], Awaitable[Answer]]


async def all_entries(
    ask: Ask, operation: str, entries: Sequence[Entry], random: Random
) -> dict[int, str]:
    """Sends all entries. Returns the codes of the entries that SQS refused for good, by position.

    Raises Unavailable if some entries have no answer after several rounds; their outcome is
    unknown.
    """
    starts = range(0, len(entries), ENTRIES_MAX)
    jobs = [
        partial(_one_batch, ask, operation, start, entries[start : start + ENTRIES_MAX], random)
        for start in starts
    ]
    return {
        at: code
        for refused in unwrap_all(await gather_results(jobs))
        for at, code in refused.items()
    }


async def _one_batch(
    ask: Ask, operation: str, start: int, entries: Sequence[Entry], random: Random
) -> dict[int, str]:
    # Entries without an answer. Their ids are positions in the whole list.
    waiting = dict(enumerate(entries, start))
    refused: dict[int, str] = {}
    ends_at = trio.current_time() + ROUNDS_S_MAX
    for attempt in range(1, ATTEMPTS_MAX + 1):
        batch = [{"Id": str(at), **entry} for at, entry in waiting.items()]
        answer = await ask(operation, {"Entries": batch})
        for done in answer.get("Successful", ()):
            waiting.pop(int(done["Id"]), None)
        for failed in answer.get("Failed", ()):
            if _is_final(failed):
                refused[int(failed["Id"])] = failed["Code"]
                waiting.pop(int(failed["Id"]), None)
        if not waiting:
            return refused
        if trio.current_time() >= ends_at:
            break
        await trio.sleep(backoff_s(attempt, random))
    raise Unavailable(f"sqs.{operation}: {len(waiting)} entries of a batch were not taken")


def _is_final(failed: Entry) -> bool:
    """Returns whether a retry cannot help. A throttle passes, even if SQS calls it the sender's
    fault; an expired receipt stays invalid, even if SQS does not."""
    code = failed["Code"]
    return code not in THROTTLES and (
        failed.get("SenderFault", False) or code.removesuffix("Exception") in _DEAD_RECEIPTS
    )


async def gather_results(
    jobs: Sequence[Callable[[], Awaitable[T]]],
) -> list[T | Failure]:
    """Runs the jobs, a few at a time. Returns their results or errors, in order.

    The error of one job does not cancel the others.
    """
    results: dict[int, T | Failure] = {}
    numbers = iter(range(len(jobs)))

    async def work() -> None:
        for number in numbers:
            try:
                results[number] = await jobs[number]()
            except (AwsError, QueueGone, Unavailable) as error:
                results[number] = error

    if len(jobs) == 1:
        await work()
    else:
        async with trio.open_nursery() as nursery:
            for _ in range(min(CONCURRENT_CALLS_MAX, len(jobs))):
                nursery.start_soon(work)
    return [results[number] for number in range(len(jobs))]


def unwrap_all(results: Sequence[T | Failure]) -> list[T]:
    """Returns the results, or raises the first error."""
    good: list[T] = []
    for result in results:
        if isinstance(result, Failure):
            raise result
        good.append(result)
    return good
