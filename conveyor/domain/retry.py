"""When a failed try is worth another one, and how long to wait for it (SPEC 6.4)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from conveyor.domain.model import FailureReason
from conveyor.domain.randomness import Random


class Backoff(msgspec.Struct, frozen=True):
    first_s: float
    delay_s_max: float


_QUICK = Backoff(first_s=1.0, delay_s_max=60.0)
BACKOFF: Mapping[FailureReason, Backoff] = {
    FailureReason.RATE_LIMITED: Backoff(first_s=5.0, delay_s_max=300.0),
    FailureReason.BLOCKED: Backoff(first_s=2.0, delay_s_max=120.0),
    FailureReason.TIMEOUT: Backoff(first_s=2.0, delay_s_max=120.0),
    FailureReason.GATEWAY_ERROR: _QUICK,
    FailureReason.BAD_TARGET: _QUICK,
    FailureReason.AUTH_FAILED: _QUICK,
    FailureReason.OTHER: _QUICK,
}
RETRY_AFTER_S_MAX = 3600.0


def retry_delay_s(
    reason: FailureReason, *, attempt: int, retry_after_s: float | None, random: Random
) -> float:
    """Doubles per attempt, jittered down to half, and never sooner than the site asked for."""
    backoff = BACKOFF[reason]
    ceiling = min(backoff.delay_s_max, backoff.first_s * 2.0 ** (attempt - 1))
    delay = ceiling * random.uniform(0.5, 1.0)
    asked = min(max(retry_after_s or 0.0, 0.0), RETRY_AFTER_S_MAX)
    return max(delay, asked)
