"""A circuit breaker: stops calls to a service that is down, and tests it with single probes.

CLOSED: every call is allowed. OPEN: no call is allowed until the next probe is due. HALF_OPEN: one
probe is running, and no other call is allowed. The evidence that a service is down differs between
services, so the caller decides when to `trip` the circuit.

A `Circuit` is a value: each operation returns the next one. Times are seconds of any monotonic
clock; time and randomness are arguments.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.ids import Random
from conveyor.domain.timing import backoff_s, jitter_s


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class ProbePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The times of probes: after `first_s`, then after twice as long each time, up to
    `delay_s_max`.

    Jitter shortens each delay to no less than half. A probe without a report after `lost_after_s`
    counts as lost, and another probe may start.
    """

    first_s: float = 1.0
    delay_s_max: float = 30.0
    lost_after_s: float = 200.0


class Circuit(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one circuit. `probe` numbers the probes of all openings, so that the late report
    of a lost probe is not taken for the report of its successor."""

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
        """Seconds until a call is allowed; 0 if one is allowed now."""
        return 0.0 if self.is_closed else max(0.0, self.next_call_at - now)

    def trip(self, *, now: float, random: Random) -> Circuit:
        """Opens a closed circuit. If it is open, failures of earlier calls change nothing."""
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
        """Returns the circuit with a new probe, or None if it is closed, no probe is due, or a
        probe is running.
        """
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
        """Closes the circuit in any state: a call was answered, so the service works."""
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
        """Opens the circuit again. The next probe is due at once, because this one was not sent."""
        if not self._is_under_way(probe):
            return self
        return msgspec.structs.replace(self, state=CircuitState.OPEN, next_call_at=now)

    def abandon_probe(self, probe: int, *, now: float, random: Random) -> Circuit:
        """Opens the circuit again, for as long as before: the probe gave no evidence."""
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
