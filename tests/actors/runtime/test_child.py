"""The restart decision: policies, restart intensity, back-off, and which siblings restart."""

from __future__ import annotations

import pytest

from actors.runtime import Intensity, Policy, Strategy
from actors.runtime.child import (
    DoNotRestart,
    GiveUp,
    Outcome,
    Restart,
    Verdict,
    decide_restart,
    siblings_of,
)

INTENSITY = Intensity(restarts_max=3, within_s=60.0, backoff_s=1.0, backoff_s_max=3.0)


@pytest.mark.parametrize(
    ("policy", "outcome", "verdict"),
    [
        (Policy.PERMANENT, Outcome.RETURNED, Restart(1.0)),
        (Policy.PERMANENT, Outcome.CRASHED, Restart(1.0)),
        (Policy.TRANSIENT, Outcome.RETURNED, DoNotRestart()),
        (Policy.TRANSIENT, Outcome.CRASHED, Restart(1.0)),
        (Policy.TEMPORARY, Outcome.RETURNED, DoNotRestart()),
        (Policy.TEMPORARY, Outcome.CRASHED, DoNotRestart()),
    ],
)
def test_the_policy_states_which_ends_cause_a_restart(
    policy: Policy, outcome: Outcome, verdict: Verdict
) -> None:
    assert decide_restart(policy, outcome, intensity=INTENSITY, restarts_at=(), now=0.0) == verdict


@pytest.mark.parametrize(
    ("restarts_at", "verdict"),
    [
        ((), Restart(1.0)),
        ((90.0,), Restart(2.0)),
        ((90.0, 95.0), Restart(3.0)),  # The delay is doubled to 4 and capped at 3.
        ((90.0, 95.0, 99.0), GiveUp()),
    ],
)
def test_the_back_off_doubles_up_to_its_cap_until_the_restarts_are_used_up(
    restarts_at: tuple[float, ...], verdict: Verdict
) -> None:
    decision = decide_restart(
        Policy.PERMANENT,
        Outcome.CRASHED,
        intensity=INTENSITY,
        restarts_at=restarts_at,
        now=100.0,
    )

    assert decision == verdict


def test_restarts_older_than_the_window_are_forgotten() -> None:
    on_the_edge = (40.0, 40.5, 41.0)

    verdict = decide_restart(
        Policy.PERMANENT,
        Outcome.CRASHED,
        intensity=INTENSITY,
        restarts_at=on_the_edge,
        now=100.0,
    )

    assert verdict == Restart(3.0)


def test_with_no_restarts_allowed_the_first_crash_gives_up() -> None:
    never = Intensity(restarts_max=0)

    verdict = decide_restart(
        Policy.PERMANENT, Outcome.CRASHED, intensity=never, restarts_at=(), now=0.0
    )

    assert verdict == GiveUp()


def test_an_intensity_that_could_never_be_exhausted_is_refused() -> None:
    with pytest.raises(AssertionError):
        Intensity(restarts_max=3, within_s=7.0, backoff_s=1.0, backoff_s_max=10.0)

    Intensity(restarts_max=3, within_s=7.1, backoff_s=1.0, backoff_s_max=10.0)


def test_a_back_off_above_its_cap_is_refused() -> None:
    with pytest.raises(AssertionError):
        Intensity(backoff_s=2.0, backoff_s_max=1.0)


def test_a_negative_restart_count_is_refused() -> None:
    with pytest.raises(AssertionError):
        Intensity(restarts_max=-1)


@pytest.mark.parametrize(
    ("strategy", "siblings"),
    [
        (Strategy.ONE_FOR_ONE, ()),
        (Strategy.ONE_FOR_ALL, (0, 2, 3)),
        (Strategy.REST_FOR_ONE, (2, 3)),
    ],
)
def test_the_strategy_states_which_siblings_restart_together(
    strategy: Strategy, siblings: tuple[int, ...]
) -> None:
    assert siblings_of(strategy, 1, 4) == siblings
