"""Back-off: delays that double, and jitter. Retries, deferrals, breakers and the SDK use it."""

from __future__ import annotations

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
