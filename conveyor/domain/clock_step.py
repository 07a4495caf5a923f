"""What to make of instants that were written by a clock which was set since (SPEC.md 4.22).

Wall clocks are set, by a day or by 40. An instant that was to come soon when it was written may
then lie far ahead. Nothing waits for it: whoever reads a deadline compares it with the longest time
that a deadline of its kind can be away.
"""

from __future__ import annotations

from conveyor.domain import limits


def is_unreal(until: float, *, now: float, ttl_s: float) -> bool:
    """Whether a deadline of at most `ttl_s` lies further ahead than one that is made now."""
    return until > now + ttl_s + limits.CLOCK_SKEW_S
