"""Delays: back-off, jitter, the waits of a poller (SPEC.md 4.6, 4.8), and deadlines that a wrong
clock has written (SPEC.md 4.22).

Wall clocks are set, by a day or by 40 days. A deadline that was near when it was written may then
be far in the future. No process waits for it: the reader of a deadline compares it with the longest
time that such a deadline can be away (`is_unreal`).
"""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.domain.ids import Random
from conveyor.domain.model import HostLimit

# 2 ** 64 times the first delay is above every bound; a larger exponent would overflow a float.
_DOUBLINGS_MAX = 64
# The wait after an empty receive doubles between these bounds. A smaller maximum costs more
# receives on empty queues; a larger one delays new tasks.
IDLE_S_MIN = 0.02
IDLE_S_MAX = 1.0
# The wait after a refused permit doubles between these bounds, while other pollers use the permits.
COOLDOWN_S_MIN = 0.25
COOLDOWN_S_MAX = 5.0
# The wait of a duplicate doubles between these bounds while its original is fetched or retried. A
# smaller maximum costs two writes per duplicate more often; a larger one delays the run's end.
DUPLICATE_S_MIN = 0.5
DUPLICATE_S_MAX = 60.0


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


def permits_to_request(*, free_slots: int, cap: int, inflight: int, batch_max: int) -> int:
    """The number of permits to request: never more than can run now."""
    return max(0, min(free_slots, cap - inflight, batch_max))


def bounce_delay_s(receives: int) -> float:
    """Seconds for which a bounced message stays hidden: 5 s, doubling, at most 300 s."""
    doublings = max(receives, 1) - 1
    return backoff_s(doublings, first_s=limits.BOUNCE_S_MIN, delay_s_max=limits.BOUNCE_S_MAX)


def duplicate_delay_s(receives: int) -> float:
    """Seconds until a duplicate looks again whether its original has ended."""
    doublings = max(receives, 1) - 1
    return backoff_s(doublings, first_s=DUPLICATE_S_MIN, delay_s_max=DUPLICATE_S_MAX)


def cooldown_s(refusals: int, random: Random) -> float:
    """Seconds without a receive after the job had no free permit, with jitter."""
    ceiling = backoff_s(refusals, first_s=COOLDOWN_S_MIN, delay_s_max=COOLDOWN_S_MAX)
    return jitter_s(ceiling, random)


def idle_s(empty_receives: int) -> float:
    """Seconds until the next receive from an empty queue, unless a wake-up comes first."""
    return backoff_s(empty_receives, first_s=IDLE_S_MIN, delay_s_max=IDLE_S_MAX)


def host_interval_s(limit: HostLimit, *, fetch_s: float) -> float:
    """Seconds between two fetches of a host if only its limit delays them."""
    spacing_s = 1.0 / limit.rate_per_s if limit.rate_per_s else 0.0
    service_s = fetch_s / limit.concurrency if limit.concurrency else 0.0
    return max(spacing_s, service_s)


def host_wait_s(turn_at: float, *, now: float, is_sure: bool) -> float:
    """Seconds for which a message stays hidden while its host is at its limit.

    It is the time until its turn, within bounds. If the pace of the host is only estimated
    (`is_sure` is False), it is at most BOUNCE_S_MIN.
    """
    longest_s = limits.BOUNCE_S_MAX if is_sure else limits.BOUNCE_S_MIN
    return min(max(turn_at - now, limits.HOST_WAIT_S_MIN), longest_s)
