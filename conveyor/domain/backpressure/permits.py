"""Back-pressure: how many permits a poller requests, and how long it waits for the next ones
(SPEC.md 4.6)."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.domain.ids import Random
from conveyor.domain.run.settlement import backoff_s, jitter_s

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
