"""When a call that failed is made again: a pure decision, for any client to act on.

A repeated POST carries the Idempotency-Key of its first try, so repeating is always safe: what
was done is answered from memory, what was begun is finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.domain.retry import backoff_s
from conveyor.sdk.errors import ApiError, SdkError, Unreachable

IN_PROGRESS = "idempotency_in_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`attempts_max` tries in all, further and further apart, or as the server asks."""

    attempts_max: int = 5
    backoff_s: float = 0.1
    backoff_s_max: float = 5.0
    retry_after_s_max: float = 100.0

    def pause_s(self, error: SdkError, *, attempt: int, luck: float) -> float | None:
        """How long to wait before another try after `attempt` failed; None to let it be.

        `luck`, from 0 to 1, spreads out clients that failed together.
        """
        if attempt >= self.attempts_max or not is_passing(error):
            return None
        asked = error.retry_after_s if isinstance(error, ApiError) else None
        if asked is not None:
            return asked if asked <= self.retry_after_s_max else None
        longest = backoff_s(attempt - 1, first_s=self.backoff_s, delay_s_max=self.backoff_s_max)
        return longest * (0.5 + luck / 2)


def is_passing(error: SdkError) -> bool:
    """Whether the same call may well succeed a little later."""
    if isinstance(error, ApiError):
        return error.status == 503 or (error.status == 409 and error.code == IN_PROGRESS)
    return isinstance(error, Unreachable)
