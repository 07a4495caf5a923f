"""Delays that double, jitter, and deadlines that a wrong clock has written (SPEC.md 4.22).

Wall clocks are set, by a day or by 40 days. A deadline that was near when it was written may then
be far in the future. No process waits for it: the reader of a deadline compares it with the longest
time that such a deadline can be away (`is_unreal`).
"""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.domain.ids import Random

# 2 ** 64 times the first delay is above every bound; a larger exponent would overflow a float.
_DOUBLINGS_MAX = 64


def backoff_s(doublings: int, *, first_s: float, delay_s_max: float) -> float:
    """Returns the first delay, doubled `doublings` times, but at most `delay_s_max`."""
    return min(delay_s_max, first_s * 2.0 ** min(doublings, _DOUBLINGS_MAX))


def jitter_s(delay_s: float, random: Random) -> float:
    """Returns a random delay between half and all of it, so that calls that failed together do not
    return together.
    """
    return delay_s * random.uniform(0.5, 1.0)


def is_unreal(until: float, *, now: float, ttl_s: float) -> bool:
    """Whether a deadline is later than one with the lifetime `ttl_s` that is made now."""
    return until > now + ttl_s + limits.CLOCK_SKEW_S
