"""DeliveryLimiter: a few attempts at a time per receiver, and single probes of one that fails."""

from __future__ import annotations

import pytest

from actors import completion_notifier
from actors.completion_notifier import DeliveryLimiter, NotBefore
from conveyor.domain.ids import CallerId
from conveyor.usecases.webhook import DeliveryOutcome
from tests.builders import CALLER, T0

URL = "https://example.com/hook"
MISS, HIT = DeliveryOutcome(False, 0.2), DeliveryOutcome(True, 0.2)


def a_limiter(at_once: int = 8, per_caller: int = 4, per_receiver: int = 2) -> DeliveryLimiter:
    return DeliveryLimiter(
        at_once_max=at_once, per_caller_max=per_caller, per_receiver_max=per_receiver
    )


def fail(limiter: DeliveryLimiter, times: int, now_s: float = T0, url: str = URL) -> None:
    for _ in range(times):
        assert limiter.acquire(CALLER, url, now_s=now_s) is None
        limiter.release(CALLER, url, MISS, now_s=now_s)


def test_a_receiver_gets_a_few_attempts_at_a_time_and_excess_ones_are_deferred() -> None:
    limiter = a_limiter()
    entered = [limiter.acquire(CALLER, URL, now_s=T0) for _ in range(4)]

    assert entered[:2] == [None, None]
    assert [entry.at_s for entry in entered[2:] if entry] == pytest.approx([T0 + 0.05, T0 + 0.1])


def test_the_receivers_of_a_caller_share_its_limit_and_other_callers_have_their_own() -> None:
    limiter = a_limiter()
    entered = [limiter.acquire(CALLER, f"{URL}/{number}", now_s=T0) for number in range(5)]

    assert entered[:4] == [None] * 4
    assert isinstance(entered[4], NotBefore)
    assert limiter.acquire(CallerId("other"), URL, now_s=T0) is None


def test_a_receiver_that_fails_repeatedly_is_deferred_for_longer_each_time() -> None:
    limiter = a_limiter()
    fail(limiter, completion_notifier.DEFERRED_AFTER)

    later = limiter.acquire(CALLER, URL, now_s=T0 + 1)
    fail(limiter, 1, now_s=T0 + completion_notifier.PROBE_S)
    even_later = limiter.acquire(CALLER, URL, now_s=T0 + completion_notifier.PROBE_S + 1)

    assert isinstance(later, NotBefore)
    assert later.is_deferred
    assert later.at_s >= T0 + completion_notifier.PROBE_S
    assert isinstance(even_later, NotBefore)
    assert even_later.at_s >= T0 + 3 * completion_notifier.PROBE_S


def test_a_deferred_receiver_gets_one_probe_at_a_time() -> None:
    limiter = a_limiter()
    fail(limiter, completion_notifier.DEFERRED_AFTER)
    now_s = T0 + completion_notifier.PROBE_S

    assert limiter.acquire(CALLER, URL, now_s=now_s) is None
    assert isinstance(limiter.acquire(CALLER, URL, now_s=now_s), NotBefore)


def test_a_delivery_ends_the_deferral_of_its_receiver() -> None:
    limiter = a_limiter()
    fail(limiter, completion_notifier.DEFERRED_AFTER)
    now_s = T0 + completion_notifier.PROBE_S
    limiter.acquire(CALLER, URL, now_s=now_s)

    limiter.release(CALLER, URL, HIT, now_s=now_s)

    assert [limiter.acquire(CALLER, URL, now_s=now_s) for _ in range(2)] == [None, None]


def test_an_attempt_that_was_not_made_does_not_count_as_a_failure() -> None:
    limiter = a_limiter()

    for _ in range(10):
        assert limiter.acquire(CALLER, URL, now_s=T0) is None
        limiter.release(CALLER, URL, None, now_s=T0)

    assert limiter.acquire(CALLER, URL, now_s=T0) is None


def test_the_number_of_remembered_receivers_is_bounded() -> None:
    limiter = a_limiter()

    for number in range(completion_notifier.RECEIVERS_MAX + 100):
        fail(limiter, 1, url=f"{URL}/{number}")

    assert len(limiter._receivers) == completion_notifier.RECEIVERS_MAX
    assert len(limiter._callers) == 0


def test_the_total_number_of_attempts_is_limited() -> None:
    limiter = a_limiter(at_once=2, per_caller=2)

    limiter.acquire(CALLER, URL, now_s=T0)
    limiter.acquire(CallerId("other"), URL, now_s=T0)

    assert limiter.is_full
