"""Back-pressure: three measures against receiving messages that cannot run: permits, cooldown,
bounce delay (SPEC.md 4.6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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


class PermitOrder(Enum):
    """When a poller detects that its job is at its cap."""

    BEFORE_RECEIVE = "a lease of the job for each message, before it is received"
    LOCAL_GATE = "what runs here is counted before a receive, what runs elsewhere after it"
    AFTER_RECEIVE = "nothing is counted before a receive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backpressure:
    """The three measures. A worker uses all of them; a benchmark disables some to measure them."""

    permits: PermitOrder = PermitOrder.BEFORE_RECEIVE
    cools_down: bool = True
    bounces_longer: bool = True

    def wanted(self, *, free_slots: int, cap: int, held: int, batch_max: int) -> int:
        """The number of messages to request, from what is known before the receive."""
        if self.permits is PermitOrder.AFTER_RECEIVE:
            return min(free_slots, batch_max)
        return permits_wanted(free_slots=free_slots, cap=cap, held=held, batch_max=batch_max)

    def cooldown_s(self, refusals: int, random: Random) -> float:
        return cooldown_s(refusals, random) if self.cools_down else IDLE_S_MIN

    def bounce_delay_s(self, receives: int) -> float:
        return bounce_delay_s(receives) if self.bounces_longer else 0.0


def permits_wanted(*, free_slots: int, cap: int, held: int, batch_max: int) -> int:
    """The number of permits to request: never more than can run now."""
    return max(0, min(free_slots, cap - held, batch_max))


def bounce_delay_s(receives: int) -> float:
    """Seconds for which a bounced message stays hidden: 5 s, doubling, at most 300 s."""
    doublings = max(receives, 1) - 1
    return backoff_s(doublings, first_s=limits.BOUNCE_S_MIN, delay_s_max=limits.BOUNCE_S_MAX)


def cooldown_s(refusals: int, random: Random) -> float:
    """Seconds without a receive after the job had no free permit, with jitter."""
    ceiling = backoff_s(refusals, first_s=COOLDOWN_S_MIN, delay_s_max=COOLDOWN_S_MAX)
    return jitter_s(ceiling, random)


def idle_s(empties: int) -> float:
    """Seconds until the next receive from an empty queue, unless a wake-up comes first."""
    return backoff_s(empties, first_s=IDLE_S_MIN, delay_s_max=IDLE_S_MAX)
