"""Limits the concurrent calls of one API key at a gateway (docs/engines.md, Gateways).

The window starts small. It jumps to the free capacity that the first response states, or grows with
every response (slow start), up to the limit that the gateway states. A refusal for concurrency
halves the window and stops new calls for a while. Afterwards it grows by about one per round of
calls, and by one a minute beyond the count at which it was refused (additive increase,
multiplicative decrease). Gateways ban keys for refusals, so refusals must stay rare.

A `CallWindow` is a value: each operation returns the next one. Times are seconds of any monotonic
clock; time and randomness are arguments. Numbers that a gateway states are clamped.
"""

from __future__ import annotations

import msgspec

from conveyor.domain import limits
from conveyor.domain.ids import Random

# With two calls, nearly every plan states its limit without a refusal; a plan of one refuses one
# call.
SIZE_FIRST = 2.0
# Before the first response, one more call may begin every FIRST_S, up to the smallest published
# plan: the first pages may be slow.
FIRST_S = 5.0
SIZE_UNANSWERED_MAX = 5.0
# No job runs more tasks at the same time, so a larger limit has no use.
LIMIT_MAX = limits.MAX_INFLIGHT_MAX
# The ceiling rises by one after this time. A smaller value causes more refusals, and gateways ban
# keys for them; a larger one leaves freed capacity unused for longer.
CEILING_S = 60.0
# The pause after a refusal without Retry-After doubles between these bounds.
PAUSE_S_FIRST = 1.0
PAUSE_S_MAX = 60.0
# One response must not stop a key for longer, whatever its Retry-After states.
RETRY_AFTER_S_MAX = 300.0


class CallWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The window of one key. `limit` is the last limit that the gateway stated.

    `ceiling` is one less than the count at which the gateway last refused a call within the limit.
    This happens when other programs use the same key.
    """

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
        """The allowed concurrent calls. At least one: without calls, the window learns nothing."""
        bounds = [self.size, LIMIT_MAX]
        bounds += [bound for bound in (self.limit, self.ceiling) if bound is not None]
        return max(1, int(min(bounds)))

    def wait_unanswered(self, waited_s: float) -> CallWindow:
        """Returns the window after `waited_s` seconds without a response to its first calls."""
        if self.is_answered:
            return self
        size = min(SIZE_FIRST + waited_s // FIRST_S, SIZE_UNANSWERED_MAX)
        return msgspec.structs.replace(self, size=max(self.size, size))

    def room(self, inflight: int, *, now: float) -> int:
        """The number of calls that may begin now, in addition to `inflight`."""
        return 0 if now < self.resume_at else max(0, self.capacity - inflight)

    def note_answer(
        self, *, limit: int | None, remaining: int | None, inflight: int, now: float
    ) -> CallWindow:
        """Records a response. `inflight` counts the running calls, including this one."""
        window = _set_limit(self, limit)
        window = msgspec.structs.replace(window, is_answered=True, refusals_in_row=0)
        if window.may_jump and window.limit is not None and remaining is not None:
            return _jump(window, inflight - 1 + remaining)
        # A window that is less than half used is no evidence for a larger one. With no capacity
        # remaining, a larger window would only cause refusals.
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
        """Records a refusal for concurrency. `inflight` includes the refused call.

        Calls that began before the window shrank belong to the same burst and do not shrink it
        again.
        """
        window = msgspec.structs.replace(_set_limit(self, limit), is_answered=True)
        if began_at >= self.shrunk_at:
            window = _shrink(window, inflight, now)
        pause_s = _pause_s(window, retry_after_s, random)
        return msgspec.structs.replace(window, resume_at=max(window.resume_at, now + pause_s))

    def restart(self) -> CallWindow:
        """Restarts after an outage: the window keeps the limit and grows from the start again."""
        return msgspec.structs.replace(
            self, size=SIZE_FIRST, is_in_slow_start=True, may_jump=False, refusals_in_row=0
        )


def _set_limit(window: CallWindow, stated: int | None) -> CallWindow:
    if stated is None:
        return window
    limit = min(max(stated, 1), LIMIT_MAX)
    return msgspec.structs.replace(window, limit=limit, size=min(window.size, float(limit)))


def _jump(window: CallWindow, room: int) -> CallWindow:
    """Enlarges the window to the free capacity of the first response. Later responses do not count
    calls that are still on their way to the gateway, so their numbers are too high."""
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
        # The limit was unknown or has changed. It explains the refusal, so no ceiling is necessary.
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
