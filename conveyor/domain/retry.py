"""How long to wait before a failed try is made again (SPEC.md 4.5); the back-off of all others."""

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

# 2 ** 64 times the first delay is above every bound; a larger exponent would overflow a float.
_DOUBLINGS_MAX = 64


def backoff_s(doublings: int, *, first_s: float, delay_s_max: float) -> float:
    """The first delay, doubled so many times, up to a bound."""
    return min(delay_s_max, first_s * 2.0 ** min(doublings, _DOUBLINGS_MAX))


def jitter_s(delay_s: float, random: Random) -> float:
    """From half of a delay to all of it: those who failed together do not come back together."""
    return delay_s * random.uniform(0.5, 1.0)


def retry_delay_s(
    reason: FailureReason, *, attempt: int, retry_after_s: float | None, random: Random
) -> float:
    """Doubles per attempt, jittered down to half, and never sooner than the site asked for."""
    backoff = BACKOFF[reason]
    ceiling = backoff_s(attempt - 1, first_s=backoff.first_s, delay_s_max=backoff.delay_s_max)
    asked = min(max(retry_after_s or 0.0, 0.0), RETRY_AFTER_S_MAX)
    return max(jitter_s(ceiling, random), asked)
