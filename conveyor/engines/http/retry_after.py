"""The Retry-After header: seconds or a date, never trusted beyond a limit."""

from __future__ import annotations

from email.utils import parsedate_to_datetime


def parse_retry_after(value: str | None, *, now: float, seconds_max: float) -> float | None:
    """Seconds to wait from `now`, within 0 and `seconds_max`; None if there is no such wish."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        # A thousand digits are a long wait too; int() would rather not read them.
        return min(float(text[:12]), seconds_max) if len(text) <= 12 else seconds_max
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(at - now, 0.0), seconds_max)
