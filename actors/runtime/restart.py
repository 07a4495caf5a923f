"""The restart decision: whether, when and with which siblings a child that ended is started again.

Pure functions: time is an argument, and nothing here knows about tasks or Trio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never


class Policy(Enum):
    """Which ends of a child cause a restart."""

    # Every end, also a plain return.
    PERMANENT = "permanent"
    # A crash only.
    TRANSIENT = "transient"
    # No end.
    TEMPORARY = "temporary"


class Strategy(Enum):
    """Which siblings restart together with a child."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Outcome(Enum):
    """How an incarnation ended by itself."""

    RETURNED = "returned"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """How often one child may be restarted, and how long each restart is delayed.

    More than `restarts_max` restarts within `within_s` give the child up. With a larger number, a
    permanent failure is hidden for longer; with a smaller one, a short outage ends the supervisor.
    """

    restarts_max: int = 5
    within_s: float = 60.0
    backoff_s: float = 0.1
    backoff_s_max: float = 10.0

    def __post_init__(self) -> None:
        assert self.restarts_max >= 0
        assert 0 <= self.backoff_s <= self.backoff_s_max
        # Otherwise the back-off alone would exceed the window, and a child that always crashes
        # would never be given up.
        assert sum(self.backoff_at(n) for n in range(self.restarts_max)) < self.within_s

    def backoff_at(self, restart_count: int) -> float:
        """Returns the delay before the next restart, after `restart_count` restarts within the
        window."""
        return min(self.backoff_s_max, self.backoff_s * 2.0**restart_count)


USUAL_INTENSITY: Final = Intensity()


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class DoNotRestart:
    pass


@dataclass(frozen=True, slots=True)
class GiveUp:
    pass


Verdict: TypeAlias = Restart | DoNotRestart | GiveUp


def decide_restart(
    policy: Policy,
    outcome: Outcome,
    *,
    intensity: Intensity,
    restarts_at: Sequence[float],
    now: float,
) -> Verdict:
    """Decides about a child that ended, by the times of its earlier restarts."""
    if not is_restarted(policy, outcome):
        return DoNotRestart()
    restart_count = len(recent(restarts_at, within_s=intensity.within_s, now=now))
    if restart_count >= intensity.restarts_max:
        return GiveUp()
    return Restart(after_s=intensity.backoff_at(restart_count))


def is_restarted(policy: Policy, outcome: Outcome) -> bool:
    match policy:
        case Policy.PERMANENT:
            return True
        case Policy.TRANSIENT:
            return outcome is Outcome.CRASHED
        case Policy.TEMPORARY:
            return False
        case _:
            assert_never(policy)


def recent(restarts_at: Sequence[float], *, within_s: float, now: float) -> tuple[float, ...]:
    """Returns the times that still count towards the intensity."""
    return tuple(at for at in restarts_at if now - at < within_s)


def siblings_of(strategy: Strategy, index: int, count: int) -> tuple[int, ...]:
    """Returns the positions, in start order, of the children that restart together with child
    `index`."""
    match strategy:
        case Strategy.ONE_FOR_ONE:
            return ()
        case Strategy.ONE_FOR_ALL:
            return tuple(other for other in range(count) if other != index)
        case Strategy.REST_FOR_ONE:
            return tuple(range(index + 1, count))
        case _:
            assert_never(strategy)
