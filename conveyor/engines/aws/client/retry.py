"""Decides which calls are retried, and when: one layer, with jitter, under a budget of the process
(docs/engines.md, AWS client).

A call that the service refused for now was not applied, and may be retried. A call without an
answer may have been applied. It is retried only if applying it twice equals applying it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor.domain.ids import Random
from conveyor.domain.run import settlement
from conveyor.engines.aws.errors import AwsError, NoResponse, is_lost, is_refused_for_now

# The first attempt and four retries.
ATTEMPTS_MAX = 5
# The ceilings of the random wait: the first, and the largest. Shorter waits repeat a throttle,
# longer ones use up the deadline.
BACKOFF_S = 0.05
BACKOFF_S_MAX = 5.0
# A full budget pays for 100 retries in a row, or for 50 after lost answers. Then each retry needs 5
# or 10 successes first, so that retries add at most a fifth to the load of a struggling service.
BUDGET_MAX = 500.0
RETRY_COST = 5.0
# A lost answer usually took a timeout, and hints at an outage rather than at a throttle.
LOST_COST = 10.0
REFUND = 1.0

# ReceiveMessage is missing on purpose: a lost call has hidden messages, and a retry hides more.
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
        "SendMessage",  # A retry may duplicate the message, but SQS delivers at least once anyway.
        "SendMessageBatch",
        "TransactGetItems",
        "UploadPart",
    }
)
# With a condition, the second try would fail on what the first one wrote, and report a refusal for
# a write that was applied.
_REPEATABLE_UNLESS = {
    "PutItem": ("ConditionExpression",),
    "DeleteItem": ("ConditionExpression",),
    "PutObject": ("IfMatch", "IfNoneMatch"),
    "CopyObject": ("IfMatch", "IfNoneMatch"),
}


def is_repeatable(operation: str, params: Mapping[str, Any]) -> bool:
    """Returns whether applying the call twice equals applying it once."""
    if operation == "TransactWriteItems":
        return "ClientRequestToken" in params
    unless = _REPEATABLE_UNLESS.get(operation)
    if unless is not None:
        return not any(name in params for name in unless)
    return operation in _REPEATABLE


@dataclass(slots=True)
class RetryBudget:
    """Retries take from the budget, and successes return to it. While nearly all calls fail, no
    call is retried."""

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
    """Returns the cost of a retry, or None if a retry is not safe or cannot help.

    A body that is an iterator was consumed by the first attempt, so it cannot be sent again.
    """
    if is_lost(error):
        body = params.get("Body", b"")
        can = is_repeatable(operation, params) and isinstance(body, bytes)
        return LOST_COST if can else None
    if isinstance(error, NoResponse) or is_refused_for_now(error):
        return RETRY_COST if isinstance(params.get("Body", b""), bytes) else None
    return None


def backoff_s(attempt: int, random: Random) -> float:
    """Returns a random wait between 0 and the ceiling ("full jitter").

    Calls that were throttled together are spread out the most this way.
    """
    ceiling = settlement.backoff_s(attempt, first_s=BACKOFF_S, delay_s_max=BACKOFF_S_MAX)
    return random.uniform(0.0, ceiling)
