"""Lanes: how many deliveries go to one receiver, and to one caller's receivers, at once
(SPEC.md 4.16).

A receiver that fails again and again is sidelined: for a growing while nothing is sent to it, then
one probe at a time, until a delivery succeeds. So neither a dead receiver nor a slow one takes the
room that others need.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from conveyor.domain.ids import CallerId
from conveyor.domain.retry import backoff_s
from conveyor.usecases.notices import Outcome

SIDELINED_AFTER = 3
SHUT_S, SHUT_S_MAX = 30.0, 600.0
BOOKED_S_MAX = 60.0
LANES_MAX = 4096

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Later:
    """There is no room before this instant."""

    at: float
    is_sidelined: bool = False


@dataclass(slots=True)
class _Lane:
    width: int
    inflight: int = 0
    failures: int = 0
    shut_until: float = 0.0
    duration_s: float = 0.1
    booked_until: float = 0.0

    @property
    def is_sidelined(self) -> bool:
        return self.failures >= SIDELINED_AFTER

    def has_room(self, now: float) -> bool:
        if self.is_sidelined:
            return self.inflight == 0 and now >= self.shut_until
        return self.inflight < self.width

    def book(self, now: float) -> Later:
        """Another appointment, at the pace at which deliveries end here."""
        begin = max(now, self.shut_until)
        booked = max(begin, self.booked_until) + self.duration_s / self.width
        self.booked_until = min(booked, begin + BOOKED_S_MAX)
        return Later(self.booked_until, self.is_sidelined)

    def passed(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self.failures, self.shut_until, self.booked_until = 0, 0.0, 0.0

    def missed(self, now: float, duration_s: float) -> None:
        self.duration_s = duration_s
        self.failures += 1
        if self.is_sidelined:
            doublings = self.failures - SIDELINED_AFTER
            self.shut_until = now + backoff_s(doublings, first_s=SHUT_S, delay_s_max=SHUT_S_MAX)


class Lanes:
    """A lane per caller and one per caller and URL, for as long as there is something to know."""

    def __init__(self, *, at_once_max: int, per_caller_max: int, per_receiver_max: int) -> None:
        assert 1 <= per_receiver_max <= per_caller_max <= at_once_max
        self._room = at_once_max
        self._per_caller_max = per_caller_max
        self._per_receiver_max = per_receiver_max
        self._callers: dict[CallerId, _Lane] = {}
        self._receivers: dict[tuple[CallerId, str], _Lane] = {}

    @property
    def is_full(self) -> bool:
        return self._room == 0

    def enter(self, caller: CallerId, url: str, *, now: float) -> Later | None:
        """Takes the room for one delivery; or says when to come back."""
        assert not self.is_full
        whole = self._callers.setdefault(caller, _Lane(self._per_caller_max))
        lane = self._receivers.setdefault((caller, url), _Lane(self._per_receiver_max))
        crowded = next((each for each in (lane, whole) if not each.has_room(now)), None)
        if crowded is not None:
            later = crowded.book(now)
            self._tidy(caller, url)
            return later
        self._room -= 1
        whole.inflight += 1
        lane.inflight += 1
        return None

    def leave(self, caller: CallerId, url: str, outcome: Outcome | None, *, now: float) -> None:
        """Gives the room back, and remembers how it went if there was a try."""
        whole, lane = self._callers[caller], self._receivers[caller, url]
        self._room += 1
        whole.inflight -= 1
        lane.inflight -= 1
        if outcome is not None:
            whole.passed(outcome.duration_s)
            if outcome.is_delivered:
                lane.passed(outcome.duration_s)
            else:
                lane.missed(now, outcome.duration_s)
        self._tidy(caller, url)

    def _tidy(self, caller: CallerId, url: str) -> None:
        _forget(self._callers, caller)
        _forget(self._receivers, (caller, url))


def _forget(lanes: dict[K, _Lane], key: K) -> None:
    """An idle lane that has not failed says nothing; of too many others the oldest goes."""
    if not (lanes[key].inflight or lanes[key].failures):
        del lanes[key]
    if len(lanes) > LANES_MAX:
        del lanes[next(key for key, lane in lanes.items() if not lane.inflight)]
