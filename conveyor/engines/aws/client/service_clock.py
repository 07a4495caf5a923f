"""ServiceClock: the time of a service, which all processes share, from the `Date` of its responses.

Workers compare instants that other workers wrote. The wall clock of a machine may be set by a day;
then the leases of all others would look expired, or endless (SPEC.md 4.22). This clock follows the
steady clock, and each response corrects the difference between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from conveyor.ports.clock import Clock

# The steady clock drifts by less than a millisecond in this time. Parsing a date takes as long as a
# tenth of a call.
OBSERVED_EVERY_S = 1.0


@dataclass(slots=True)
class ServiceClock:
    """See Clock. Until the first response, and where responses have no date, it is the machine's
    clock."""

    machine: Clock
    _ahead_s: float | None = field(default=None, init=False)
    _observed_at: float = field(default=float("-inf"), init=False)

    def now(self) -> float:
        if self._ahead_s is None:
            return self.machine.now()
        return self.machine.steady() + self._ahead_s

    def steady(self) -> float:
        return self.machine.steady()

    def observe(self, headers: Sequence[tuple[bytes, bytes]], *, sent_at: float) -> None:
        """Reads the date of a response to a request that was sent at `sent_at` by `steady`."""
        received_at = self.machine.steady()
        if received_at - self._observed_at < OBSERVED_EVERY_S:
            return
        date = date_of(headers)
        if date is not None:
            self.correct(date, sent_at=sent_at)

    def correct(self, date: float, *, sent_at: float) -> None:
        """Moves the clock as little as possible so that it agrees with the date.

        A date has no fractions of a second, and was written between the request and the response.
        So it agrees with every clock in a range of a little more than a second.
        """
        received_at = self.machine.steady()
        least_s, most_s = date - received_at, date + 1.0 - sent_at
        ahead_s = self.machine.now() - received_at if self._ahead_s is None else self._ahead_s
        self._ahead_s = min(max(ahead_s, least_s), most_s)
        self._observed_at = received_at


def date_of(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """The `Date` of a response in epoch seconds, or None if there is none that can be read."""
    date = next((value for name, value in headers if name == b"date"), None)
    if date is None:
        return None
    try:
        return parsedate_to_datetime(date.decode("latin-1")).timestamp()
    except (ValueError, OverflowError):
        return None
