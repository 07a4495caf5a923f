"""Backoff is bounded, grows, and is never shorter than a site asked for."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.model import FailureReason
from conveyor.domain.run.settlement import BACKOFF, RETRY_AFTER_S_MAX, retry_delay_s
from conveyor.domain.timing import backoff_s, jitter_s

reasons = st.sampled_from(FailureReason)
attempts = st.integers(1, 10)


class Highest:
    """A random source that always draws the upper end of a range, which shows the ceiling."""

    def uniform(self, a: float, b: float, /) -> float:
        return b

    def getrandbits(self, k: int, /) -> int:
        return (1 << k) - 1


def test_every_reason_has_a_backoff_of_its_own() -> None:
    assert set(BACKOFF) == set(FailureReason)


@given(reasons, attempts, st.integers())
def test_a_delay_lies_between_half_the_ceiling_and_the_ceiling(
    reason: FailureReason, attempt: int, seed: int
) -> None:
    delay = retry_delay_s(reason, attempt=attempt, retry_after_s=None, random=Random(seed))
    ceiling = retry_delay_s(reason, attempt=attempt, retry_after_s=None, random=Highest())

    assert ceiling / 2 <= delay <= ceiling <= BACKOFF[reason].delay_s_max


@given(reasons, attempts)
def test_the_ceiling_doubles_until_it_meets_its_limit(reason: FailureReason, attempt: int) -> None:
    backoff = BACKOFF[reason]

    now = retry_delay_s(reason, attempt=attempt, retry_after_s=None, random=Highest())
    then = retry_delay_s(reason, attempt=attempt + 1, retry_after_s=None, random=Highest())

    assert then == min(2 * now, backoff.delay_s_max)
    assert retry_delay_s(reason, attempt=1, retry_after_s=None, random=Highest()) == backoff.first_s


@given(reasons, attempts, st.floats(0, RETRY_AFTER_S_MAX), st.integers())
def test_a_retry_is_never_sooner_than_the_site_asked_for(
    reason: FailureReason, attempt: int, asked_s: float, seed: int
) -> None:
    delay = retry_delay_s(reason, attempt=attempt, retry_after_s=asked_s, random=Random(seed))

    assert asked_s <= delay <= max(asked_s, BACKOFF[reason].delay_s_max)


@given(reasons, attempts, st.floats(RETRY_AFTER_S_MAX, allow_nan=False))
def test_a_site_cannot_ask_for_more_than_an_hour(
    reason: FailureReason, attempt: int, asked_s: float
) -> None:
    delay = retry_delay_s(reason, attempt=attempt, retry_after_s=asked_s, random=Random(1))

    assert delay == RETRY_AFTER_S_MAX


@given(reasons, attempts, st.floats(max_value=0, allow_nan=False))
def test_a_negative_retry_after_changes_nothing(
    reason: FailureReason, attempt: int, asked_s: float
) -> None:
    plain = retry_delay_s(reason, attempt=attempt, retry_after_s=None, random=Random(1))

    assert retry_delay_s(reason, attempt=attempt, retry_after_s=asked_s, random=Random(1)) == plain


def test_a_delay_doubles_up_to_its_bound_after_any_number_of_failures() -> None:
    delays = [backoff_s(n, first_s=0.5, delay_s_max=3.0) for n in (0, 1, 2, 3, 10_000)]

    assert delays == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.floats(0.0, 1e6), st.integers())
def test_jitter_leaves_at_least_half_of_a_delay(delay_s: float, seed: int) -> None:
    assert delay_s / 2 <= jitter_s(delay_s, Random(seed)) <= delay_s
