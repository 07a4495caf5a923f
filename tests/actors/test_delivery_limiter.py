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


def some_lanes(at_once: int = 8, per_caller: int = 4, per_receiver: int = 2) -> DeliveryLimiter:
    return DeliveryLimiter(
        at_once_max=at_once, per_caller_max=per_caller, per_receiver_max=per_receiver
    )


def fail(room: DeliveryLimiter, times: int, now_s: float = T0, url: str = URL) -> None:
    for _ in range(times):
        assert room.acquire(CALLER, url, now_s=now_s) is None
        room.release(CALLER, url, MISS, now_s=now_s)


def test_a_receiver_has_room_for_a_few_attempts_and_later_times_for_the_others() -> None:
    room = some_lanes()
    entered = [room.acquire(CALLER, URL, now_s=T0) for _ in range(4)]

    assert entered[:2] == [None, None]
    assert [entry.at_s for entry in entered[2:] if entry] == pytest.approx([T0 + 0.05, T0 + 0.1])


def test_the_receivers_of_a_caller_share_its_room_and_other_callers_have_their_own() -> None:
    room = some_lanes()
    entered = [room.acquire(CALLER, f"{URL}/{number}", now_s=T0) for number in range(5)]

    assert entered[:4] == [None] * 4
    assert isinstance(entered[4], NotBefore)
    assert room.acquire(CallerId("other"), URL, now_s=T0) is None


def test_a_receiver_that_fails_repeatedly_is_deferred_for_longer_each_time() -> None:
    room = some_lanes()
    fail(room, completion_notifier.DEFERRED_AFTER)

    later = room.acquire(CALLER, URL, now_s=T0 + 1)
    fail(room, 1, now_s=T0 + completion_notifier.PROBE_S)
    even_later = room.acquire(CALLER, URL, now_s=T0 + completion_notifier.PROBE_S + 1)

    assert isinstance(later, NotBefore)
    assert later.is_deferred
    assert later.at_s >= T0 + completion_notifier.PROBE_S
    assert isinstance(even_later, NotBefore)
    assert even_later.at_s >= T0 + 3 * completion_notifier.PROBE_S


def test_a_deferred_receiver_gets_one_probe_at_a_time() -> None:
    room = some_lanes()
    fail(room, completion_notifier.DEFERRED_AFTER)
    now_s = T0 + completion_notifier.PROBE_S

    assert room.acquire(CALLER, URL, now_s=now_s) is None
    assert isinstance(room.acquire(CALLER, URL, now_s=now_s), NotBefore)


def test_a_delivery_ends_the_deferral_of_its_receiver() -> None:
    room = some_lanes()
    fail(room, completion_notifier.DEFERRED_AFTER)
    now_s = T0 + completion_notifier.PROBE_S
    room.acquire(CALLER, URL, now_s=now_s)

    room.release(CALLER, URL, HIT, now_s=now_s)

    assert [room.acquire(CALLER, URL, now_s=now_s) for _ in range(2)] == [None, None]


def test_an_attempt_that_was_not_made_does_not_count_as_a_failure() -> None:
    room = some_lanes()

    for _ in range(10):
        assert room.acquire(CALLER, URL, now_s=T0) is None
        room.release(CALLER, URL, None, now_s=T0)

    assert room.acquire(CALLER, URL, now_s=T0) is None


def test_the_number_of_remembered_receivers_is_bounded() -> None:
    room = some_lanes()

    for number in range(completion_notifier.RECEIVERS_MAX + 100):
        fail(room, 1, url=f"{URL}/{number}")

    assert len(room._receivers) == completion_notifier.RECEIVERS_MAX
    assert len(room._callers) == 0


def test_no_more_than_all_the_room_is_taken() -> None:
    room = some_lanes(at_once=2, per_caller=2)

    room.acquire(CALLER, URL, now_s=T0)
    room.acquire(CallerId("other"), URL, now_s=T0)

    assert room.is_full
