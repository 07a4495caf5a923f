"""A circuit breaker: stops calls to a service that is away, and tests it with single probes.

CLOSED: every call may be made. OPEN: no call may be made until the next probe is due. HALF_OPEN:
one probe is under way, and no other call may be made. What counts as evidence that a service is
away differs between services, so the caller decides when to `trip` the circuit.

A `Circuit` is a value: each operation returns the next one. Times are seconds of any monotonic
clock; time and randomness are arguments.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.randomness import Random
from conveyor.domain.run.settlement import backoff_s, jitter_s


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class ProbePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When probes are made: after `first_s`, then after twice as long each time, up to
    `delay_s_max`, each delay jittered down to half of it. A probe that has reported nothing after
    `lost_after_s` counts as lost, and another may be made in its place."""

    first_s: float = 1.0
    delay_s_max: float = 30.0
    lost_after_s: float = 200.0


class Circuit(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one circuit. `probe` numbers the probes of all openings, so that the report of
    a lost one is told from that of its successor."""

    policy: ProbePolicy = ProbePolicy()
    state: CircuitState = CircuitState.CLOSED
    opened_at: float | None = None
    next_call_at: float = 0.0
    probe: int = 0
    failed_probes: int = 0

    @property
    def is_closed(self) -> bool:
        return self.state is CircuitState.CLOSED

    def wait_s(self, now: float) -> float:
        """Seconds until a call may be made: 0 when one may be made now."""
        return 0.0 if self.is_closed else max(0.0, self.next_call_at - now)

    def trip(self, *, now: float, random: Random) -> Circuit:
        """Opens a closed circuit. Reports of calls from before it opened change nothing."""
        if not self.is_closed:
            return self
        return msgspec.structs.replace(
            self,
            state=CircuitState.OPEN,
            opened_at=now,
            failed_probes=0,
            next_call_at=now + self._delay_s(0, random),
        )

    def start_probe(self, *, now: float) -> Circuit | None:
        """The circuit with a new probe under way; None while the circuit is closed, no probe is
        due, or one is under way."""
        if self.is_closed or self.wait_s(now) > 0:
            return None
        return msgspec.structs.replace(
            self,
            state=CircuitState.HALF_OPEN,
            probe=self.probe + 1,
            next_call_at=now + self.policy.lost_after_s,
        )

    def pass_probe(self, probe: int) -> Circuit:
        """Closes the circuit: the service works again."""
        if not self._is_under_way(probe):
            return self
        return self.close()

    def close(self) -> Circuit:
        """Closes the circuit whatever was under way: a call was answered all the same."""
        return msgspec.structs.replace(
            self, state=CircuitState.CLOSED, opened_at=None, failed_probes=0, next_call_at=0.0
        )

    def fail_probe(self, probe: int, *, now: float, random: Random) -> Circuit:
        """Opens the circuit again, for longer than before."""
        if not self._is_under_way(probe):
            return self
        failed = self.failed_probes + 1
        return msgspec.structs.replace(
            self,
            state=CircuitState.OPEN,
            failed_probes=failed,
            next_call_at=now + self._delay_s(failed, random),
        )

    def return_probe(self, probe: int, *, now: float) -> Circuit:
        """Opens the circuit again, with the next probe due at once: this one was never sent."""
        if not self._is_under_way(probe):
            return self
        return msgspec.structs.replace(self, state=CircuitState.OPEN, next_call_at=now)

    def abandon_probe(self, probe: int, *, now: float, random: Random) -> Circuit:
        """Opens the circuit again, for as long as before: the probe told nothing."""
        if not self._is_under_way(probe):
            return self
        return msgspec.structs.replace(
            self,
            state=CircuitState.OPEN,
            next_call_at=now + self._delay_s(self.failed_probes, random),
        )

    def _is_under_way(self, probe: int) -> bool:
        return self.state is CircuitState.HALF_OPEN and probe == self.probe

    def _delay_s(self, failed_probes: int, random: Random) -> float:
        policy = self.policy
        ceiling = backoff_s(failed_probes, first_s=policy.first_s, delay_s_max=policy.delay_s_max)
        return jitter_s(ceiling, random)
