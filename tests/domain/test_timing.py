"""Timing of pollers: no more permits are requested than can run, and waits grow within bounds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits, timing

counts = st.integers(0, 1000)


@given(counts, counts, counts, counts)
def test_permits_never_exceed_any_of_their_bounds(
    free_slots: int, cap: int, inflight: int, batch_max: int
) -> None:
    count = timing.permits_to_request(
        free_slots=free_slots, cap=cap, inflight=inflight, batch_max=batch_max
    )

    assert count >= 0
    assert count == 0 or count + inflight <= cap
    assert count <= free_slots
    assert count <= batch_max
    assert count in {0, free_slots, cap - inflight, batch_max}


@pytest.mark.parametrize(("receives", "delay_s"), [(0, 5), (1, 5), (2, 10), (3, 20), (7, 300)])
def test_a_bounced_message_is_delayed_longer_each_time(receives: int, delay_s: float) -> None:
    assert timing.bounce_delay_s(receives) == delay_s


@given(st.integers(0, 10**9))
def test_a_bounce_delay_stays_within_its_bounds(receives: int) -> None:
    delay = timing.bounce_delay_s(receives)

    assert limits.BOUNCE_S_MIN <= delay <= limits.BOUNCE_S_MAX


@given(st.integers(0, 10**9), st.integers())
def test_a_cooldown_stays_within_its_bounds(refusals: int, seed: int) -> None:
    delay = timing.cooldown_s(refusals, Random(seed))

    assert timing.COOLDOWN_S_MIN / 2 <= delay <= timing.COOLDOWN_S_MAX


@given(st.integers(0, 20))
def test_a_cooldown_never_shrinks_with_more_refusals(refusals: int) -> None:
    now = timing.cooldown_s(refusals, Random(1))

    assert now <= timing.cooldown_s(refusals + 1, Random(1))


@given(st.integers(0, 10**9))
def test_an_idle_wait_grows_to_one_second(empty_receives: int) -> None:
    wait = timing.idle_s(empty_receives)

    assert timing.IDLE_S_MIN <= wait <= timing.idle_s(empty_receives + 1)
    assert wait <= timing.IDLE_S_MAX == 1.0
