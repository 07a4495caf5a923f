"""When a call is made again: one layer, with jitter, under a budget of the whole process.

What the service refused for now was not done, and may be asked again. What got no answer may have
been done, and is asked again only if doing it twice is doing it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor.domain.randomness import Random
from conveyor.domain.run import settlement
from conveyor.engines.aws.errors import AwsError, NoResponse, is_lost, is_refused_for_now

ATTEMPTS_MAX = 5
BACKOFF_S = 0.05
BACKOFF_S_MAX = 5.0
BUDGET_MAX = 500.0
RETRY_COST = 5.0
LOST_COST = 10.0
REFUND = 1.0

# A lost ReceiveMessage is not here: it has hidden its messages, and asking again hides more.
_REPEATABLE = frozenset(
    {
        "AbortMultipartUpload",
        "BatchGetItem",
        "BatchWriteItem",
        "ChangeMessageVisibility",
        "ChangeMessageVisibilityBatch",
        "CreateQueue",
        "DeleteMessage",
        "DeleteMessageBatch",
        "DeleteObject",
        "DeleteObjects",
        "DeleteQueue",
        "GetItem",
        "GetObject",
        "GetQueueAttributes",
        "GetQueueUrl",
        "HeadObject",
        "ListObjectsV2",
        "ListQueues",
        "Query",
        "Scan",
        "SendMessage",  # Twice is once more than once, as the queue itself may do.
        "SendMessageBatch",
        "TransactGetItems",
        "UploadPart",
    }
)
_REPEATABLE_UNLESS = {
    "PutItem": ("ConditionExpression",),
    "DeleteItem": ("ConditionExpression",),
    "PutObject": ("IfMatch", "IfNoneMatch"),
    "CopyObject": ("IfMatch", "IfNoneMatch"),
}


def is_repeatable(operation: str, params: Mapping[str, Any]) -> bool:
    """Whether doing it twice leaves the world as doing it once does."""
    if operation == "TransactWriteItems":
        return "ClientRequestToken" in params
    unless = _REPEATABLE_UNLESS.get(operation)
    if unless is not None:
        return not any(name in params for name in unless)
    return operation in _REPEATABLE


@dataclass(slots=True)
class RetryBudget:
    """Retries take from it, successes give back: when nearly all fail, nobody tries again."""

    left: float = BUDGET_MAX

    def take(self, cost: float) -> bool:
        if self.left < cost:
            return False
        self.left -= cost
        return True

    def refund(self) -> None:
        self.left = min(BUDGET_MAX, self.left + REFUND)


def retry_cost(
    error: AwsError | NoResponse, operation: str, params: Mapping[str, Any]
) -> float | None:
    """What trying again takes from the budget; None when it must not, or would not help."""
    if is_lost(error):
        body = params.get("Body", b"")
        can = is_repeatable(operation, params) and isinstance(body, bytes)
        return LOST_COST if can else None
    if isinstance(error, NoResponse) or is_refused_for_now(error):
        return RETRY_COST if isinstance(params.get("Body", b""), bytes) else None
    return None


def backoff_s(attempt: int, random: Random) -> float:
    """Anything up to the ceiling: calls that were throttled together are spread out the most."""
    ceiling = settlement.backoff_s(attempt, first_s=BACKOFF_S, delay_s_max=BACKOFF_S_MAX)
    return random.uniform(0.0, ceiling)
