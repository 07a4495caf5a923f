"""Back-pressure: how many permits a poller requests, and how long it waits for the next ones
(SPEC.md 4.6) or for its turn at a host (SPEC.md 4.8)."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.domain.ids import Random
from conveyor.domain.model import HostLimit
from conveyor.domain.timing import backoff_s, jitter_s

# The wait after an empty receive doubles between these bounds. A smaller maximum costs more
# receives on empty queues; a larger one delays new tasks.
IDLE_S_MIN = 0.02
IDLE_S_MAX = 1.0
# The wait after a refused permit doubles between these bounds, while other pollers use the permits.
COOLDOWN_S_MIN = 0.25
COOLDOWN_S_MAX = 5.0


def permits_to_request(*, free_slots: int, cap: int, inflight: int, batch_max: int) -> int:
    """The number of permits to request: never more than can run now."""
    return max(0, min(free_slots, cap - inflight, batch_max))


def bounce_delay_s(receives: int) -> float:
    """Seconds for which a bounced message stays hidden: 5 s, doubling, at most 300 s."""
    doublings = max(receives, 1) - 1
    return backoff_s(doublings, first_s=limits.BOUNCE_S_MIN, delay_s_max=limits.BOUNCE_S_MAX)


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
