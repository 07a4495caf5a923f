"""Detects deadlines that were written by a clock that was set back since (SPEC.md 4.22).

Wall clocks are set, by a day or by 40 days. A deadline that was near when it was written may then
be far in the future. No process waits for it: the reader of a deadline compares it with the longest
time that such a deadline can be away.
"""

from __future__ import annotations

from conveyor.domain import limits


def is_unreal(until: float, *, now: float, ttl_s: float) -> bool:
    """Whether a deadline is later than one with the lifetime `ttl_s` that is made now."""
    return until > now + ttl_s + limits.CLOCK_SKEW_S
