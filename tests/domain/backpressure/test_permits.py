"""Nothing is asked for that cannot be run, and waiting grows within bounds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.domain.backpressure import permits as backpressure
from conveyor.domain.backpressure.permits import Backpressure, PermitOrder

counts = st.integers(0, 1000)


@given(counts, counts, counts, counts)
def test_permits_never_exceed_any_of_their_bounds(
    free_slots: int, cap: int, held: int, batch_max: int
) -> None:
    wanted = backpressure.permits_wanted(
        free_slots=free_slots, cap=cap, held=held, batch_max=batch_max
    )

    assert wanted >= 0
    assert wanted == 0 or wanted + held <= cap
    assert wanted <= free_slots
    assert wanted <= batch_max
    assert wanted in {0, free_slots, cap - held, batch_max}


@pytest.mark.parametrize(("receives", "delay_s"), [(0, 5), (1, 5), (2, 10), (3, 20), (7, 300)])
def test_a_bounced_message_stays_away_longer_each_time(receives: int, delay_s: float) -> None:
    assert backpressure.bounce_delay_s(receives) == delay_s


@given(st.integers(0, 10**9))
def test_a_bounce_stays_within_its_bounds(receives: int) -> None:
    delay = backpressure.bounce_delay_s(receives)

    assert limits.BOUNCE_S_MIN <= delay <= limits.BOUNCE_S_MAX


@given(st.integers(0, 10**9), st.integers())
def test_a_cooldown_stays_within_its_bounds(refusals: int, seed: int) -> None:
    delay = backpressure.cooldown_s(refusals, Random(seed))

    assert backpressure.COOLDOWN_S_MIN / 2 <= delay <= backpressure.COOLDOWN_S_MAX


@given(st.integers(0, 20))
def test_a_cooldown_never_shrinks_with_more_refusals(refusals: int) -> None:
    now = backpressure.cooldown_s(refusals, Random(1))

    assert now <= backpressure.cooldown_s(refusals + 1, Random(1))


@given(st.integers(0, 10**9))
def test_an_idle_wait_grows_to_one_second(empties: int) -> None:
    wait = backpressure.idle_s(empties)

    assert backpressure.IDLE_S_MIN <= wait <= backpressure.idle_s(empties + 1)
    assert wait <= backpressure.IDLE_S_MAX == 1.0


def test_a_worker_has_all_three_lines_unless_it_is_told_otherwise() -> None:
    lines = Backpressure()

    assert lines.permits is PermitOrder.BEFORE_RECEIVE
    assert lines.wanted(free_slots=50, cap=5, held=3, batch_max=10) == 2
    assert lines.cooldown_s(3, Random(1)) == backpressure.cooldown_s(3, Random(1))
    assert lines.bounce_delay_s(3) == backpressure.bounce_delay_s(3)


@pytest.mark.parametrize(
    ("permits", "wanted"),
    [(PermitOrder.BEFORE_RECEIVE, 0), (PermitOrder.LOCAL_GATE, 0), (PermitOrder.AFTER_RECEIVE, 10)],
)
def test_only_without_any_permits_the_cap_is_not_looked_at(
    permits: PermitOrder, wanted: int
) -> None:
    lines = Backpressure(permits=permits)

    assert lines.wanted(free_slots=50, cap=5, held=5, batch_max=10) == wanted


def test_without_a_line_nothing_is_waited_for() -> None:
    lines = Backpressure(cools_down=False, bounces_longer=False)

    assert lines.cooldown_s(9, Random(1)) == backpressure.IDLE_S_MIN
    assert lines.bounce_delay_s(9) == 0.0
