"""How many calls of one API key may be under way at a gateway (docs/engines.md, Gateways).

The window starts small, jumps to what the first answer says is free, or grows with every answer
(slow start), up to the limit that the gateway states. A refusal for concurrency shrinks it to half
and stops new calls for a while; afterwards it grows by about one per round of calls, and past the
count at which it was refused by one a minute (additive increase, multiplicative decrease): keys are
banned for refusals, so these must stay rare.

A `CallWindow` is a value: each operation returns the next one. Times are seconds of any monotonic
clock; time and randomness are arguments. Numbers that a gateway states are clamped, never believed.
"""

from __future__ import annotations

import msgspec

from conveyor.domain import limits
from conveyor.domain.randomness import Random

# Two calls tell the limit to nearly every plan without a refusal, and a plan of one refuses one.
SIZE_FIRST = 2.0
# While nothing is answered one more may begin every FIRST_S, up to the smallest published plan: the
# first pages may be slow ones.
FIRST_S = 5.0
SIZE_UNANSWERED_MAX = 5.0
# More tasks than this never run at once, so no larger limit is of use.
LIMIT_MAX = limits.MAX_INFLIGHT_MAX
# A count that was refused is tried again, by one, after this long.
CEILING_S = 60.0
PAUSE_S_FIRST = 1.0
PAUSE_S_MAX = 60.0
# One answer must not stop a key for longer, whatever its Retry-After says.
RETRY_AFTER_S_MAX = 300.0


class CallWindow(msgspec.Struct, frozen=True, kw_only=True):
    """`limit` is what the gateway stated last. `ceiling` is one less than the count at which it
    last refused a call although that was within the limit: others use the same key."""

    size: float = SIZE_FIRST
    limit: int | None = None
    ceiling: int | None = None
    ceiling_at: float = 0.0
    is_in_slow_start: bool = True
    may_jump: bool = True
    is_answered: bool = False
    shrunk_at: float = float("-inf")
    resume_at: float = float("-inf")
    refusals_in_row: int = 0

    @property
    def capacity(self) -> int:
        """How many calls may be under way; at least one, or nothing would ever be learned."""
        bounds = [self.size, LIMIT_MAX]
        bounds += [bound for bound in (self.limit, self.ceiling) if bound is not None]
        return max(1, int(min(bounds)))

    def wait_unanswered(self, waited_s: float) -> CallWindow:
        """The window after so long without any answer to its first calls."""
        if self.is_answered:
            return self
        size = min(SIZE_FIRST + waited_s // FIRST_S, SIZE_UNANSWERED_MAX)
        return msgspec.structs.replace(self, size=max(self.size, size))

    def room(self, inflight: int, *, now: float) -> int:
        """How many more calls may begin now, beside `inflight`."""
        return 0 if now < self.resume_at else max(0, self.capacity - inflight)

    def note_answer(
        self, *, limit: int | None, remaining: int | None, inflight: int, now: float
    ) -> CallWindow:
        """A call was answered, with `inflight` calls under way, itself included."""
        window = _set_limit(self, limit)
        window = msgspec.structs.replace(window, is_answered=True, refusals_in_row=0)
        if window.may_jump and window.limit is not None and remaining is not None:
            return _jump(window, inflight - 1 + remaining)
        # A window that is not used says nothing; neither may it grow where nothing remains.
        if remaining == 0 or 2 * inflight < window.capacity:
            return window
        return _grow(_raise_ceiling(window, now))

    def note_refusal(
        self,
        *,
        limit: int | None,
        inflight: int,
        began_at: float,
        now: float,
        retry_after_s: float | None,
        random: Random,
    ) -> CallWindow:
        """A call was refused for concurrency, with `inflight` under way, itself included.

        Calls that began before the window shrank are part of the same burst: they shrink nothing.
        """
        window = msgspec.structs.replace(_set_limit(self, limit), is_answered=True)
        if began_at >= self.shrunk_at:
            window = _shrink(window, inflight, now)
        pause_s = _pause_s(window, retry_after_s, random)
        return msgspec.structs.replace(window, resume_at=max(window.resume_at, now + pause_s))

    def restart(self) -> CallWindow:
        """After an outage: the limit is remembered, the load comes back step by step."""
        return msgspec.structs.replace(
            self, size=SIZE_FIRST, is_in_slow_start=True, may_jump=False, refusals_in_row=0
        )


def _set_limit(window: CallWindow, stated: int | None) -> CallWindow:
    if stated is None:
        return window
    limit = min(max(stated, 1), LIMIT_MAX)
    return msgspec.structs.replace(window, limit=limit, size=min(window.size, float(limit)))


def _jump(window: CallWindow, room: int) -> CallWindow:
    """To what the first answer says is free. Later answers do not count the calls that are on
    their way, so they tell too much."""
    assert window.limit is not None
    size = max(window.size, float(min(window.limit, room)))
    return msgspec.structs.replace(window, size=size, may_jump=False)


def _grow(window: CallWindow) -> CallWindow:
    step = 1.0 if window.is_in_slow_start else 1.0 / window.size
    bounds = [bound for bound in (window.limit, window.ceiling) if bound is not None]
    return msgspec.structs.replace(window, size=min([window.size + step, LIMIT_MAX, *bounds]))


def _raise_ceiling(window: CallWindow, now: float) -> CallWindow:
    if (
        window.ceiling is None
        or window.size < window.ceiling
        or now < window.ceiling_at + CEILING_S
    ):
        return window
    ceiling = window.ceiling + 1
    is_gone = window.limit is not None and ceiling >= window.limit
    return msgspec.structs.replace(window, ceiling=None if is_gone else ceiling, ceiling_at=now)


def _shrink(window: CallWindow, inflight: int, now: float) -> CallWindow:
    window = msgspec.structs.replace(
        window,
        is_in_slow_start=False,
        may_jump=False,
        shrunk_at=now,
        refusals_in_row=window.refusals_in_row + 1,
    )
    if window.limit is not None and inflight > window.limit:
        # It was not known, or has changed: the limit itself is the answer.
        return msgspec.structs.replace(window, size=float(window.limit), ceiling=None)
    ceiling = max(1, inflight - 1)
    return msgspec.structs.replace(
        window, size=max(1.0, ceiling / 2), ceiling=ceiling, ceiling_at=now
    )


def _pause_s(window: CallWindow, retry_after_s: float | None, random: Random) -> float:
    if retry_after_s is not None:
        return min(max(retry_after_s, 0.0), RETRY_AFTER_S_MAX)
    doublings = min(max(window.refusals_in_row - 1, 0), 16)
    return min(PAUSE_S_FIRST * 2.0**doublings, PAUSE_S_MAX) * random.uniform(0.5, 1.0)
